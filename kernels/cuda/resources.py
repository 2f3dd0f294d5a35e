"""What a compiled kernel needs of a multiprocessor, read from the report of ptxas."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Resources:
    """registers: of a thread; stack_bytes: of its arrays in local memory; spill_bytes: stores and
    loads of registers that did not fit; shared_bytes: static shared memory of a block."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


def parse_report(log: str) -> dict[str, Resources]:
    """The resources of every kernel (by its symbol) in a log that `ptxas -v` wrote.

    Raises:
        ValueError: a kernel's report lacks a line.
    """
    found = {}
    parts = re.split(r"(?=ptxas info\s+: Compiling entry function)", log)
    for part in parts:
        entry = _ENTRY.search(part)
        if entry is None:
            continue
        stack, used = _STACK.search(part), _USED.search(part)
        if stack is None or used is None:
            raise ValueError(f"the report of {entry['name']} is not complete: {part!r}")
        frame, stores, loads = map(int, stack.groups())
        shared = _SHARED.search(part)
        found[entry["name"]] = Resources(
            int(used[1]), frame, stores + loads, int(shared[1]) if shared else 0
        )
    return found
