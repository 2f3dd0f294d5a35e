"""Measure every GPU figure: `python -m benchmarks.gpu`.

`--device cpu --scale tiny --out DIR` tries the harness; its numbers mean nothing.  Writes DATE.json
and DATE.md after every figure; their names have the minute of the start.
"""

import sys
import time
from argparse import Namespace
from datetime import UTC, datetime

import torch

from benchmarks import harness
from benchmarks.harness import Figures, table

from .runner import Worker, run
from .scale import SCALES
from .targets import FIGURES, TARGETS, Target

RESULTS = harness.RESULTS / "gpu"
OPTIONS = {
    "--device": ("cuda", "where it runs", ("cuda", "cpu")),
    "--scale": ("full", "how large everything is", SCALES),
    "--only": (list(FIGURES), "figures that are measured", FIGURES),
    # With starts and ends, under 8 minutes.
    "--limit-s": (450.0, "of all figures together"),
}
TRIAL = (
    "**A trial of the harness at tiny sizes or without a GPU: none of these numbers is a figure.**"
)
HEAD = ["figure", "at least", "aim", "measured", "reached", "spread"]


def arguments(given: list[str] | None = None) -> Namespace:
    """Checked: what is not a figure goes nowhere near the results."""

    def refuse(args: Namespace) -> str | None:
        args.trial = args.device != "cuda" or args.scale != "full"
        if args.trial and args.out is None:
            return "a trial is not written to the results: give a folder with --out"
        args.out = args.out or RESULTS
        return None

    return harness.arguments("gpu", __doc__, OPTIONS, given, refuse)


def main(given: list[str] | None = None) -> int:
    """Returns 1 where a figure failed, 2 where none can be measured: then nothing is written."""
    options, started = arguments(given), time.monotonic()
    if options.device == "cuda" and not torch.cuda.is_available():
        said = "torch sees no CUDA device; --device cpu --scale tiny --out DIR tries the harness"
        print(f"benchmarks.gpu: {said} without one", file=sys.stderr)
        return 2
    stem = options.out / datetime.now(UTC).strftime("%Y-%m-%d-%H%M")
    about = harness.begun("gpu", given) | {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "trial": options.trial,
        "scale": options.scale,
    }
    text = stem.with_suffix(".md")

    def wrote(machine: Figures, results: Figures) -> None:
        took = {"took_s": round(time.monotonic() - started, 1)}
        result = about | took | {"machine": machine, "figures": results}
        harness.write_json(stem.with_suffix(".json"), result)
        text.write_text(page(result), encoding="utf-8")
        name, one = list(results.items())[-1]
        print(f"{name}: {one['status']} {one.get('points') or one.get('reason', '')}", flush=True)

    # A trial finds errors, however slow the machine it runs on.
    patience = 10 if options.trial else 1
    chosen = [(name, patience * FIGURES[name].budget_s) for name in options.only]
    results = run(Worker(options.device, options.scale), chosen, options.limit_s, wrote)
    print(text.read_text(encoding="utf-8"))
    return int(any(one["status"] in ("failed", "no time left") for one in results.values()))


def page(result: Figures) -> str:
    """What was measured on what, every target's line, what failed and why."""
    machine, figures = result["machine"], result["figures"]
    versions = ", ".join(f"{k} {v}" for k, v in machine.get("versions", {}).items() if v)
    rows = [
        _row(target, figures[target.figure], result["trial"])
        for target in TARGETS
        if target.figure in figures
    ]
    # Kernels and shapes that have a share of their own.
    kernels = [
        [f"{name} {part}", f"{1e6 * found['median_s']:.1f} us", f"{100 * found['share']:.1f}%"]
        for name, one in figures.items()
        for part, found in one.get("details", {}).items()
        if isinstance(found, dict) and "share" in found
    ]
    parts = [
        f"# GPU figures, {result['date']}\n",
        f"{TRIAL}\n" if result["trial"] else "",
        f"`{result['command']}` at {result['commit']}, {result['took_s']:.0f} s.\n"
        f"{machine.get('name', 'no device')}, {machine.get('capability', '')} {versions}.\n",
        table(HEAD, rows),
        table(["kernel", "time", "share of a copy"], kernels) if kernels else "",
        *_notes(figures),
    ]
    return "\n".join(part for part in parts if part)


def _row(target: Target, one: Figures, trial: bool) -> list[str]:
    """One target's line; empty cells where nothing was measured."""
    value, details = one.get("points", {}).get(target.point), one.get("details", {})
    sign = "<= " if target.lower else ""
    timings = [details, *(timing for timing in details.values() if isinstance(timing, dict))]
    spreads = [timing["spread"] for timing in timings if "spread" in timing]
    return [
        target.title,
        *("" if b is None else sign + target.write(b) for b in (target.least, target.aim)),
        target.write(value) if value is not None else one["status"],
        "" if value is None or trial else target.met(value),
        f"{100 * max(spreads):.1f}%" if spreads else "",  # the widest behind the figure
    ]


def _notes(figures: Figures) -> list[str]:
    """What could not be measured, in its own words; what the engine complained of meanwhile, and
    what must be known of a figure."""
    lines = []
    for name, one in figures.items():
        lines += [f"{name}, the engine: {line}\n" for line in one.get("said", [])]
        details = one.get("details", {})
        lines += [f"{name}: {details[word]}\n" for word in ("warning", "note") if word in details]
        if "reason" in one:
            lines.append(f"{name}, {one['status']}:\n\n```\n{one['reason']}\n```\n")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
