"""What limits the two kernels of a decode step, by the hardware's counters: Nsight Compute (ncu).

`python -m tools.gpu_hour.counters KERNEL GROUP` launches one of them, for ncu to profile.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "HBM",
    "lts__t_sector_hit_rate.pct": "L2 hits",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue active",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active",
}
CASES = (
    ("decode_attention", "1"),
    ("decode_attention", "4"),
    ("decode_attention", "8"),
    ("linear", "1"),
    ("linear in FP8", "1"),
)
"""Kernel, and query heads a key head (of `linear`: rows)."""

BATCH, CONTEXT, KV_HEADS, HEAD_SIZE, WIDTH = 64, 512, 16, 128, 2048


def find() -> str | None:
    """The program's path."""
    return shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")


def command(ncu: str, kernel: str, group: str) -> list[str]:
    """What profiles one launch of the kernel, after one that loads it.

    The clocks stay as they are: to lock them needs rights that a rented machine may not give.
    """
    options = ["--csv", "--clock-control", "none", "--metrics", ",".join(METRICS)]
    name = kernel.split(maxsplit=1)[0]
    options += ["--kernel-name", f"regex:{name}", "--launch-skip", "1", "--launch-count", "1"]
    return [ncu, *options, sys.executable, "-m", "tools.gpu_hour.counters", kernel, group]


def read(output: str) -> dict[str, str]:
    """Each metric's value with its unit, from ncu's CSV; other lines are passed over.

    Raises:
        ValueError: There is no such table: the message is the output's end.
    """
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if '"Metric Name"' in line), None)
    if start is None:
        raise ValueError("\n".join(lines[-5:]) or "ncu printed nothing")
    found = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if (name := row.get("Metric Name")) in METRICS:
            found[str(name)] = f"{row['Metric Value']} {row['Metric Unit']}".strip()
    return found


def table(limit_s: float) -> str:
    """Every case's counters, in Markdown; where they cannot be read, why."""
    ncu = find()
    if ncu is None:
        return "ncu was not found: no counters.\n"
    lines = [f"| kernel | {' | '.join(METRICS.values())} |", "|---|" + "---|" * len(METRICS)]
    for kernel, group in CASES:
        title = f"{kernel}, {group}"
        try:
            done = subprocess.run(
                command(ncu, kernel, group),
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=limit_s / len(CASES),
                check=False,
            )
            found = read(done.stdout + done.stderr)
            lines.append(f"| {title} | {' | '.join(_cells(found))} |")
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            lines.append(f"| {title} | {' '.join(str(error).split())[:300]} |")
    return "\n".join(lines) + "\n"


def _cells(found: dict[str, str]) -> Iterable[str]:
    return (found.get(name, "") for name in METRICS)


def launch_twice(kernel: str, group: int, device: str = "cuda") -> None:
    """Two launches on random data: the first loads the kernel."""
    import torch  # noqa: PLC0415 (to plan a profile takes no torch)

    from nightjar.kernels import cuda, pack_linear  # noqa: PLC0415

    half = torch.float16
    if kernel.startswith("linear"):
        in_fp8 = kernel.endswith("FP8")
        dtype = torch.bfloat16 if in_fp8 else half
        weight = torch.randn(4 * WIDTH, WIDTH, device=device).to(dtype)
        x = torch.randn(group, WIDTH, device=device).to(dtype)
        packed = pack_linear(weight, None, "fp8" if in_fp8 else "float")
        for _ in range(2):
            packed.linear(x, None, None)
        return
    blocks = BATCH * CONTEXT // 32
    shape = (blocks, KV_HEADS, 32, HEAD_SIZE)
    keys, values = (torch.randn(shape, device=device).to(half) for _ in range(2))
    q = torch.randn(BATCH, group * KV_HEADS, HEAD_SIZE, device=device).to(half)
    tables = torch.arange(blocks, dtype=torch.int32, device=device).view(BATCH, -1)
    lengths = torch.full((BATCH,), CONTEXT, dtype=torch.int32, device=device)
    for _ in range(2):
        cuda.decode_attention.decode_attention(q, keys, values, tables, lengths, HEAD_SIZE**-0.5)


if __name__ == "__main__":
    launch_twice(sys.argv[1], int(sys.argv[2]))
