"""Where a compiled module keeps its shared memory and its variables."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .findings import short_name

_DYNAMIC = "cuda_host_dynamic_shared"
_LAUNCH = "cuda_host_launch"
_LINE = re.compile(r"\s*\d+: ([0-9a-f]+)\s+(\d+|0x[0-9a-f]+) (TLS|OBJECT|FUNC)\s.*?\s\d+ (.*)")


@dataclass(frozen=True, order=True)
class Symbol:
    """A variable: its offset, its size in bytes, its name."""

    offset: int
    n_bytes: int
    name: str

    @property
    def is_compilers(self) -> bool:
        """g++ may keep a flag beside a shared array of a class, though it has nothing to run."""
        return self.name.startswith("guard variable")


@dataclass(frozen=True)
class Symbols:
    """The symbols of a module that matter to a launch.

    Attributes:
        shared: Static shared variables; offsets are in thread-local storage.
        dynamic_offset: Of dynamic shared memory, there too.
        variables: `__device__` and `__constant__` variables; offsets are in the library.
        launch_offset: Of the function that the driver calls, in the library.
    """

    shared: list[Symbol]
    dynamic_offset: int
    variables: list[Symbol]
    launch_offset: int


def read_symbols(library: Path) -> Symbols:
    """Read a compiled module's symbol table."""
    command = ["readelf", "--syms", "--wide", "--demangle", str(library)]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    by_kind: dict[str, set[Symbol]] = {"TLS": set(), "OBJECT": set(), "FUNC": set()}
    for match in filter(None, map(_LINE.match, table.splitlines())):
        offset, n_bytes, kind, name = match.groups()
        by_kind[kind].add(Symbol(int(offset, 16), int(n_bytes, 0), name))
    (dynamic,) = (s.offset for s in by_kind["TLS"] if s.name == _DYNAMIC)
    (launch,) = (s.offset for s in by_kind["FUNC"] if s.name == _LAUNCH)
    # `extern __shared__` names stand for the dynamic memory, whose size the launch says.
    shared = [s for s in by_kind["TLS"] if s.offset != dynamic]
    variables = [s for s in by_kind["OBJECT"] if "cuda_host" not in s.name]
    return Symbols(_renamed(shared), dynamic, _renamed(variables), launch)


def _renamed(symbols: list[Symbol]) -> list[Symbol]:
    return [Symbol(s.offset, s.n_bytes, short_name(s.name)) for s in sorted(symbols)]
