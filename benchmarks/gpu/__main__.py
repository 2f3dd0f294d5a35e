"""Measure every GPU figure: `python -m benchmarks.gpu`.

    --device cpu --scale tiny --out DIR   tries the harness; its numbers mean nothing
    --only NAME,NAME                      some figures

Writes DATE.json and DATE.md after every figure; their names have the minute of the start.
"""

import argparse
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import writing

from .report import page
from .runner import Worker, run
from .scale import SCALES
from .targets import FIGURES

RESULTS = writing.RESULTS / "gpu"
LIMIT_S = 450.0
"""Of all figures together: with starts and ends, under 8 minutes."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Checked: what is not a figure goes nowhere near the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scale", choices=tuple(SCALES), default="full")
    parser.add_argument("--only", type=writing.words(FIGURES), default=list(FIGURES))
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--out", type=Path, help="a folder; without it, the results")
    found = parser.parse_args(given)
    found.trial = found.device != "cuda" or found.scale != "full"
    if found.trial and found.out is None:
        parser.error("a trial is not written to the results: give a folder with --out")
    found.out = found.out or RESULTS
    if found.out.exists() and not found.out.is_dir():
        parser.error(f"--out {found.out} is no folder")
    return found


def main(given: list[str] | None = None) -> int:
    """Returns 1 where a figure failed, 2 where none can be measured: then nothing is written."""
    options, started = arguments(given), time.monotonic()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks.gpu: torch sees no CUDA device; --device cpu --scale tiny --out DIR tries "
            "the harness without one",
            file=sys.stderr,
        )
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / datetime.now(UTC).strftime("%Y-%m-%d-%H%M")
    about = writing.begun("benchmarks.gpu", given) | {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": writing.commit(),
        "trial": options.trial,
        "scale": options.scale,
    }
    text = stem.with_suffix(".md")

    def wrote(machine: dict[str, Any], results: dict[str, Any]) -> None:
        result = about | {
            "took_s": round(time.monotonic() - started, 1),
            "machine": machine,
            "figures": results,
        }
        writing.write_json(stem.with_suffix(".json"), result)
        text.write_text(page(result), encoding="utf-8")
        name, one = list(results.items())[-1]
        print(f"{name}: {one['status']} {one.get('points') or one.get('reason', '')}", flush=True)

    # A trial finds errors, however slow the machine it runs on.
    patience = 10 if options.trial else 1
    chosen = [(name, patience * FIGURES[name].budget_s) for name in options.only]
    results = run(Worker(options.device, options.scale), chosen, options.limit_s, wrote)
    print(text.read_text(encoding="utf-8"))
    return int(any(one["status"] in ("failed", "no time left") for one in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
