"""What a launch did wrong, in words: which memory, which threads, where in the source."""

import ctypes
import functools
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FRAMES, _PARTIES = 8, 8
_OWN_FOLDERS = ("tests/cuda_host/include/", "tests/cuda_host/runtime/")
_PARAMETER_LIST = re.compile(r"\((?:[^()]|\([^()]*\))*\)(?: const)?")
_SMALL_FLOATS = (
    ("cuda_host::SmallFloat<cuda_host::Half>", "__half"),
    ("cuda_host::SmallFloat<cuda_host::Bfloat16>", "__nv_bfloat16"),
)

# In the order of `cuda_host::Kind`, `Action` and `CudaHostWarpOperation`.
KINDS = (
    "race",
    "out of bounds",
    "misaligned",
    "uninitialised read",
    "write to const",
    "barrier divergence",
    "deadlock",
    "warp mask",
    "inactive lane",
    "trap",
    "no progress",
)
_ACTIONS = (
    "reads",
    "writes",
    "updates atomically",
    "waits at __syncthreads",
    "waits in",
    "has returned",
    "is",
)
_WAITS_IN_WARP = 4
_WARP_OPERATIONS = ("__syncwarp", "a shuffle", "a vote", "__match_any_sync", "a warp reduction")


class PartyLayout(ctypes.Structure):
    """`cuda_host::Party`."""

    _fields_ = (
        ("block", ctypes.c_uint32),
        ("first_thread", ctypes.c_uint32),
        ("last_thread", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("action", ctypes.c_uint32),
        ("operation", ctypes.c_uint32),
        ("mask", ctypes.c_uint32),
        ("frames", ctypes.c_uint32),
        ("places", ctypes.c_uint64 * _FRAMES),
    )


class FindingLayout(ctypes.Structure):
    """`cuda_host::Finding`."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("region", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("bytes", ctypes.c_uint32),
        ("parties", ctypes.c_uint32),
        ("occurrences", ctypes.c_uint64),
        ("party", PartyLayout * _PARTIES),
        ("text", ctypes.c_char * 128),
    )


@dataclass(frozen=True)
class Finding:
    """One thing that a kernel did wrong, at one place.

    Attributes:
        kind: One of KINDS.
        text: What happened, to which memory, by which threads, where in the source.
        occurrences: How often it happened there.
    """

    kind: str
    text: str
    occurrences: int


class KernelFault(Exception):  # noqa: N818 - the field's word for it
    """A kernel did something that it must not do.

    Attributes:
        kernel: Its name.
        findings: All that was found in the launch.
    """

    def __init__(self, kernel: str, findings: Sequence[Finding], seed: int) -> None:
        lines = [f"{kernel}, schedule seed {seed}:", *(f"- {f.kind}: {f.text}" for f in findings)]
        super().__init__("\n".join(lines))
        self.kernel = kernel
        self.findings = tuple(findings)

    @property
    def kinds(self) -> set[str]:
        """The kinds among the findings."""
        return {finding.kind for finding in self.findings}


@dataclass(frozen=True)
class RegionName:
    """What a region of memory is called, and its size in bytes."""

    name: str
    n_bytes: int


class Reporter:
    """Turns the runtime's findings into words.

    Args:
        library: The compiled module, whose debug information knows the source lines.
        load_address: Where it was loaded.
        regions: The launch's regions, in the order they were given.
        grid: Blocks in x, y, z.
        block: Threads in x, y, z.
    """

    def __init__(
        self,
        library: Path,
        load_address: int,
        regions: Sequence[RegionName],
        grid: Sequence[int],
        block: Sequence[int],
    ) -> None:
        self._library, self._load_address = library, load_address
        self._regions, self._grid, self._block = regions, grid, block

    def describe(self, raw: FindingLayout) -> Finding | None:
        """The finding in words; None if it proves to be none."""
        kind = KINDS[raw.kind]
        parties = list(raw.party[: raw.parties])
        if kind == "barrier divergence" and len({self._place(party) for party in parties}) == 1:
            return None  # one place in the source, compiled twice
        what = self._what(kind, raw)
        times = f" ({raw.occurrences} times)" if raw.occurrences > 1 else ""
        who = "; ".join(self._who(party) for party in parties)
        return Finding(kind, ": ".join(filter(None, [what, who])) + times, raw.occurrences)

    def _what(self, kind: str, raw: FindingLayout) -> str:
        if raw.text:
            return raw.text.decode(errors="replace")
        if kind == "inactive lane":
            return f"a shuffle reads lane {raw.offset}, which its mask does not name"
        if kind in {"barrier divergence", "deadlock", "warp mask", "no progress"}:
            return ""
        if raw.region < 0:
            return f"{raw.bytes} bytes at address {raw.offset:#x}, near no array"
        region = self._regions[raw.region]
        end = raw.offset + raw.bytes
        if raw.offset < 0:
            where = f"{raw.bytes} bytes, {-raw.offset} before the beginning of {region.name}"
        elif end > region.n_bytes:
            where = f"{raw.bytes} bytes at offset {raw.offset} of {region.name}"
        else:
            where = f"bytes {raw.offset} to {end - 1} of {region.name}"
        return f"{where} ({region.n_bytes} bytes)"

    def _who(self, party: PartyLayout) -> str:
        action = _ACTIONS[party.action]
        if party.action == _WAITS_IN_WARP:
            action += f" {_WARP_OPERATIONS[party.operation]} with mask {party.mask:#010x}"
        threads = f"thread {self._thread(party.first_thread)}"
        if party.threads > 1:
            last = self._thread(party.last_thread)
            threads = f"{party.threads} threads, {self._thread(party.first_thread)} to {last},"
        block = _coordinates(party.block, self._grid)
        place = self._place(party)
        return f"{threads} of block {block} {action}" + (f" at {place}" if place else "")

    def _thread(self, linear: int) -> str:
        return _coordinates(linear, self._block)

    def _place(self, party: PartyLayout) -> str:
        # A return address is behind its call; one byte less is inside.
        addresses = tuple(p - self._load_address - 1 for p in party.places[: party.frames])
        return ", called at ".join(_source_lines(self._library, addresses))


def _coordinates(linear: int, size: Sequence[int]) -> str:
    x, y, z = linear % size[0], linear // size[0] % size[1], linear // (size[0] * size[1])
    return f"({x}, {y}, {z})"


@functools.cache
def _source_lines(library: Path, addresses: tuple[int, ...]) -> tuple[str, ...]:
    """`file:line in function` of each address, inlined callers too; the host's own left out."""
    if not addresses:
        return ()
    hexadecimal = [f"{address:#x}" for address in addresses]
    command = ["addr2line", "-C", "-f", "-i", "-e", str(library), *hexadecimal]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = []
    for function, position in zip(output[::2], output[1::2], strict=True):
        file, _, line = position.partition(" ")[0].rpartition(":")
        if file in {"", "??"} or "CUDA host" in file:
            continue
        if not any(folder in file for folder in _OWN_FOLDERS):
            found.append(f"{Path(file).name}:{line} in {short_name(function)}")
    return tuple(found)


def short_name(demangled: str) -> str:
    """A name without parameter lists and return type; CUDA's types by CUDA's names."""
    for ours, cuda in _SMALL_FLOATS:
        demangled = demangled.replace(ours, cuda)
    demangled = demangled.replace("(anonymous namespace)::", "")
    return _PARAMETER_LIST.sub("", demangled).removeprefix("void ").replace(" >", ">")
