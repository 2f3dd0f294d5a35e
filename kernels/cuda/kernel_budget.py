"""Compile every kernel of the catalogue and compare its registers and memory with a budget.

`python -m nightjar.kernels.cuda.kernel_budget` checks every architecture.  With `--update` it
writes what it measures into budget.json.  No GPU is needed.  Registers decide how many blocks a
multiprocessor holds.  A spill, or an array that does not fit into registers, costs memory traffic.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TypeAlias

from nightjar.kernels.cuda import nvrtc
from nightjar.kernels.cuda.catalogue import ARCHITECTURES, by_source
from nightjar.kernels.cuda.kernel import CTYPES, FP8, Kernel
from nightjar.kernels.cuda.resources import Resources, parse_report

BUDGET = Path(__file__).with_name("budget.json")

Measured: TypeAlias = dict[str, Resources]
"""By the kernel's expression."""

Budget: TypeAlias = dict[str, dict[str, Resources]]
"""By architecture, then by `group` of kernels: the most that any of them may need."""

INSTANCES_AT_ONCE = 8
"""Kernels of one compilation: few, so that the cores share the work evenly."""


def group(kernel: Kernel) -> str:
    """Return the name of the kernels that share a budget: the function.

    Decode attention is also split by its query heads, and norms by the columns that a thread holds,
    because both keep those in registers.  What reads or writes a cache in FP8 is apart.
    """
    name = kernel.entry
    if CTYPES[FP8] in kernel.arguments:
        name += " in FP8"
    if kernel.entry == "decode_attention":
        return f"{name}, {kernel.arguments[3]} heads"
    if kernel.entry == "norm":
        return f"{name}, {'x'.join(kernel.arguments[-3:])} columns"
    return name


def measure(kernels: Iterable[Kernel], arch: str) -> Measured:
    """Compile kernels of one source and read what they need."""
    listed = list(kernels)
    binary = nvrtc.compile_source(listed[0].source, [k.expression for k in listed], arch)
    report = parse_report(binary.log)
    return {k.expression: report[binary.names[k.expression]] for k in listed}


def measure_all(arch: str, sources: Mapping[str, list[Kernel]]) -> Measured:
    """Measure the kernels of every source, on all cores."""
    parts = [
        kernels[start : start + INSTANCES_AT_ONCE]
        for kernels in sources.values()
        for start in range(0, len(kernels), INSTANCES_AT_ONCE)
    ]
    found: Measured = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for part in pool.map(partial(measure, arch=arch), parts):
            found |= part
    return found


def most_needed(measured: Measured, kernels: Iterable[Kernel]) -> dict[str, Resources]:
    """Return the smallest budget that these measurements keep."""
    found: dict[str, Resources] = {}
    for kernel in kernels:
        needs, before = asdict(measured[kernel.expression]), found.get(group(kernel))
        if before is not None:
            needs = {name: max(value, getattr(before, name)) for name, value in needs.items()}
        found[group(kernel)] = Resources(**needs)
    return found


def violations(
    measured: Measured, kernels: Iterable[Kernel], budget: Mapping[str, Resources]
) -> list[str]:
    """Return a line for each number that exceeds the budget."""
    lines = []
    for kernel in kernels:
        allowed = budget.get(group(kernel))
        if allowed is None:
            lines.append(f"{kernel.expression}: no budget for {group(kernel)!r}; run with --update")
            continue
        needs = measured[kernel.expression]
        for field in fields(Resources):
            need, limit = getattr(needs, field.name), getattr(allowed, field.name)
            if need > limit:
                lines.append(f"{kernel.expression}: {need} {field.name}, the budget is {limit}")
    return lines


def read_budget(path: Path = BUDGET) -> Budget:
    """Read the committed budget."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    return {
        arch: {name: Resources(**needs) for name, needs in groups.items()}
        for arch, groups in raw.items()
    }


def write_budget(budget: Budget, path: Path = BUDGET) -> None:
    """Write one line a group, so that a diff shows each change."""
    blocks = []
    for arch, groups in budget.items():
        lines = [f"    {json.dumps(n)}: {json.dumps(asdict(r))}" for n, r in sorted(groups.items())]
        blocks.append(f"  {json.dumps(arch)}: {{\n" + ",\n".join(lines) + "\n  }")
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


def main() -> int:
    """Command line: the exit status says whether everything is within budget."""
    parser = argparse.ArgumentParser(description="Compile all kernels and check their budgets.")
    parser.add_argument(
        "--update", action="store_true", help="replace budget.json by what is measured"
    )
    update = parser.parse_args().update
    sources = by_source()
    kernels = [kernel for group_ in sources.values() for kernel in group_]
    budget = {} if update else read_budget()
    beyond = []
    for arch in ARCHITECTURES:
        measured = measure_all(arch, sources)
        if update:
            budget[arch] = most_needed(measured, kernels)
        beyond += [f"{arch}: {line}" for line in violations(measured, kernels, budget[arch])]
    if update:
        write_budget(budget)
    sys.stdout.write("\n".join([*beyond, f"{len(kernels)} kernels, {len(beyond)} beyond"]) + "\n")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
