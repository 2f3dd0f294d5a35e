"""The log of versions: what each was predicted to reach, and what it did.

    python -m benchmarks.gpu.log begin "what this version changes"
    python -m benchmarks.gpu.log end benchmarks/results/gpu/DATE.json

`begin` writes a section with predictions and empty outcomes; `end` fills the newest section's from
a run on a GPU.  Outcomes are never written by hand.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .__main__ import RESULTS, version
from .predict import H200, predictions
from .report import values
from .targets import TARGETS

LOG = RESULTS / "LOG.md"
HEAD = """# What each version was to reach on a GPU, and what it did

Newest first. Predictions are the limits of the kernels' own bytes and operations on {machine}
(`benchmarks/gpu/predict.py` says how, docs/cuda.md which); a line without one is a time that no
such sum gives. An outcome is empty until a run on a GPU has measured it; its device and its spread
stand in that run's own page beside this one.

"""
COLUMNS = "| figure | at least | aim | prediction | outcome |\n|---|---|---|---|---|\n"
NOT_RUN = "Not measured yet.\n"


def section(title: str, commit: str, date: str, predicted: dict[str, float]) -> str:
    """A version's part, without outcomes."""
    lines = []
    for point, target in TARGETS.items():
        bounds = ["" if b is None else target.write(b) for b in (target.least, target.aim)]
        lines.append(_line(point, bounds, target.write(predicted.get(point)), ""))
    return f"## {title}\n\n{date}, after {commit}. {NOT_RUN}\n{COLUMNS}{''.join(lines)}\n"


def _line(point: str, bounds: list[str], prediction: str, outcome: str) -> str:
    return f"| {TARGETS[point].title} | {' | '.join([*bounds, prediction, outcome])} |\n"


def begin(text: str, made: str) -> str:
    """The log with a new section before the others; an empty log gets its head."""
    head = HEAD.format(machine=H200.name)
    if text and not text.startswith(head):
        raise ValueError("the log does not begin as this program writes it: see HEAD")
    return head + made + text.removeprefix(head)


def end(text: str, result: dict[str, Any], name: str) -> str:
    """The log with the newest section's outcomes.

    Raises:
        ValueError: the result is a trial's, or the section has outcomes already, or lacks a figure.
    """
    if result["trial"]:
        raise ValueError("a trial's numbers are no outcomes")
    first, mark, rest = text.partition("\n## ")
    newest, next_mark, older = rest.partition("\n## ")
    if not mark or NOT_RUN not in newest:
        raise ValueError("the newest section has its outcomes: begin another")
    said = f"Measured on {result['machine']['name']} at {result['version']}: [{name}]({name}).\n"
    newest = newest.replace(NOT_RUN, said)
    measured = values(result)
    for point, target in TARGETS.items():
        start = newest.find(f"| {target.title} |")
        if start < 0:
            raise ValueError(f"the newest section has no line {target.title!r}: begin another")
        stop = newest.index("\n", start)
        cells = newest[start:stop].strip("|").split("|")
        cells[-1] = f" {measured.get(point, '')} "
        newest = newest[:start] + f"|{'|'.join(cells)}|" + newest[stop:]
    return first + mark + newest + next_mark + older


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.log")
    parser.add_argument("step", choices=("begin", "end"))
    parser.add_argument("what", help="what a version changes; or the JSON of its run")
    options = parser.parse_args(given)
    text = LOG.read_text(encoding="utf-8") if LOG.is_file() else ""
    try:
        if options.step == "begin":
            today = datetime.now(UTC).date().isoformat()
            text = begin(text, section(options.what, version(), today, predictions()))
        else:
            path = Path(options.what)
            result = json.loads(path.read_text(encoding="utf-8"))
            text = end(text, result, path.with_suffix(".md").name)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    LOG.parent.mkdir(parents=True, exist_ok=True)
    LOG.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
