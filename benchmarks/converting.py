"""How fast a checkpoint of 1.3 billion weights is converted, beside copying its files.

A Megatron-LM checkpoint of random weights in FP16 is written below --work, and synced. Then copying
its files and converting them are timed by turns, each with a final fsync. The pages of the files
are dropped before, so that the disk is read. Converting is the whole command, from its start to its
end.
"""

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.harness import DEMO_MODEL, Benchmark, Figures, by_turns, seconds_of
from nightjar.pipeline.front.cli import app

ROUNDS = 3
CONVERT = "import sys; from benchmarks.converting import convert; convert(*sys.argv[1:])"


def write_source(folder: Path, args: Namespace) -> int:
    """Write the shards; returns their bytes."""
    # Not for the process that converts: its memory is a figure.
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    from tests.megatron_writer import Layout, write_checkpoint  # noqa: PLC0415

    config = GPT2Config(
        vocab_size=args.tokens,
        n_positions=2048,
        n_embd=args.hidden,
        n_layer=args.layers,
        n_head=args.hidden // 64,
    )
    write_checkpoint(GPT2LMHeadModel(config).half(), folder, Layout(tp=args.ranks))
    return sum(path.stat().st_size for path in folder.rglob("*.pt"))


def forget(*files: Path) -> None:
    """Drop the files' pages, so that the next reader reads the disk."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source: Path, target: Path) -> None:
    """Copy a folder's files by `cp`, and sync them."""
    subprocess.run(["cp", "-r", source, target], check=True)
    for path in target.rglob("*.pt"):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def peak_mib() -> float:
    """The most memory that this process has had resident."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def convert(source: str, target: str) -> None:
    """In a process of its own: run `nightjar convert`, and say what memory it took."""
    before = peak_mib()
    command = ["convert", source, "--tokenizer", str(DEMO_MODEL), "--out", target]
    app(command, standalone_mode=False)
    print(json.dumps({"peak_mib": peak_mib(), "start_mib": before}))


def measure(args: Namespace, folder: Path) -> Figures:
    """Both by turns."""
    source, target = folder / "source", folder / "target"
    size = write_source(source, args)
    memory: list[dict[str, float]] = []

    def run_convert() -> None:
        command = [sys.executable, "-c", CONVERT, str(source), str(target)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        memory.append(json.loads(done.stdout.splitlines()[-1]))

    def timed(run: Callable[[], None]) -> float:
        forget(*(path for path in source.rglob("*") if path.is_file()))
        seconds = seconds_of(run)
        shutil.rmtree(target)
        return seconds

    ways = {"copy": lambda: timed(lambda: copy(source, target))}
    took = by_turns(ways | {"convert": lambda: timed(run_convert)}, ROUNDS)
    medians = {f"{name}_median_s": round(median(found), 2) for name, found in took.items()}
    return {
        "bytes": size,
        "ranks": args.ranks,
        **{f"{name}_s": found for name, found in took.items()},
        "gib": round(size / 2**30, 2),
        **{name: max(one[name] for one in memory) for name in ("peak_mib", "start_mib")},
        **medians,
        "share_of_copy": round(medians["copy_median_s"] / medians["convert_median_s"], 3),
    }


OPTIONS = {
    "--layers": (24, "of the model"),
    "--hidden": (2048, "its width"),
    "--ranks": (8, "shards"),
    "--tokens": (51_200, "of its vocabulary"),
}
BENCHMARK = Benchmark("converting", __doc__, measure, options=OPTIONS)

if __name__ == "__main__":
    BENCHMARK.main()
