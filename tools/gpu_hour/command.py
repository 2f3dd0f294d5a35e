"""The command line: `tools/first_gpu_hour STAGE`, and `tools/first_gpu_hour prepare` before it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.harness import commit

from .apart import ROOT
from .page import Page
from .stages import END_S, STAGE_S, STAGES, Run

CUBINS = ROOT / "gpu-cubins"
DESCRIPTION = """Test and measure Nightjar on a GPU, in five stages of at most nine minutes:
1 kernels, 2 engine, 3 figures, 4 causes, 5 memory checks.

Before a GPU is at hand, `tools/first_gpu_hour prepare` compiles all kernels into gpu-cubins/, which
then travels with the checkout.  Each stage prints one page, and writes it to --out with a log.
"""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Checked."""
    parser = argparse.ArgumentParser(
        prog="tools/first_gpu_hour",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    stages = [*map(str, STAGES), "prepare"]
    parser.add_argument("stage", choices=stages, help="its number; prepare: compile the kernels")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-hour", help="folder of the pages")
    parser.add_argument("--cubins", type=Path, default=CUBINS, help="folder of compiled kernels")
    parser.add_argument("--arch", default="sm_90", help="architecture that `prepare` compiles for")
    parser.add_argument("--jobs", type=int, default=0, help="test processes at a time")
    parser.add_argument("--limit-s", type=float, default=STAGE_S, help="of the whole stage")
    parser.add_argument(
        "--dry-run", action="store_true", help="without a GPU: kernels run on the CPU host"
    )
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Returns 0 if all is well, 1 if something failed, 2 if there is no GPU."""
    options = arguments(given)
    if options.stage == "prepare":
        return prepare(options.arch, options.cubins)
    if not options.dry_run and (fault := device_fault()):
        print(f"tools/first_gpu_hour: {fault}; --dry-run needs no GPU", file=sys.stderr)
        return 2
    if not options.dry_run:
        use_prebuilt(options.cubins)
    started = time.monotonic()
    stage = STAGES[int(options.stage)]
    # Each process holds a GPU context of its own; of the CPU host two fill two cores.
    jobs = options.jobs or (2 if options.dry_run else min(4, os.cpu_count() or 1))
    run = Run(options.dry_run, options.out, options.cubins, jobs, options.limit_s, _tell)
    page = Page(int(options.stage), stage.title, about(options.dry_run))
    stage.fill(run, page, started + options.limit_s - END_S)
    page.seconds = time.monotonic() - started
    path = page.save(options.out)
    print(f"\n{page.write()}\nThe page: {path}")
    return int(not page.is_good)


def prepare(arch: str, folder: Path) -> int:
    """Compile every kernel for an architecture; no GPU is needed."""
    from nightjar.kernels.cuda.catalogue import all_kernels  # noqa: PLC0415
    from nightjar.kernels.cuda.cubin_cache import prebuild  # noqa: PLC0415

    kernels, started = list(all_kernels()), time.monotonic()
    compiled = prebuild(arch, kernels, folder)
    took = time.monotonic() - started
    print(f"{folder} has {len(kernels)} kernels for {arch}: {compiled} compiled in {took:.0f} s")
    return 0


def use_prebuilt(folder: Path) -> None:
    """Let every program of every stage take its kernels from a folder, where they are there."""
    from nightjar.kernels.cuda.cubin_cache import PREBUILT  # noqa: PLC0415

    os.environ[PREBUILT] = str(folder.resolve())


def device_fault() -> str | None:
    """Why no stage can run here; None if one can."""
    try:
        import torch  # noqa: PLC0415
    except ImportError as error:
        return f"torch cannot be imported ({error})"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def about(dry: bool) -> dict[str, str]:
    """When, what, how: the page's head."""
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": " ".join(["tools/first_gpu_hour", *sys.argv[1:]]),
    }
    if dry:
        found["dry run"] = "on the CPU; no number is a figure, nothing was shown about a GPU"
    return found


def _tell(line: str) -> None:
    print(line, flush=True)
