"""One table of every figure on a GPU: its goal, its prediction, and what a run measured.

    python -m benchmarks.gpu.log                                     goals and predictions alone
    python -m benchmarks.gpu.log benchmarks/results/gpu/DATE.json    with a run's outcomes

Writes benchmarks/results/gpu/LOG.md.  Outcomes are never written by hand.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .__main__ import RESULTS
from .predict import H200, predictions
from .report import values
from .targets import TARGETS

LOG = RESULTS / "LOG.md"
HEAD = f"""# Figures on a GPU: goal, prediction, outcome

A prediction is the limit of the kernels' own bytes and operations on {H200.name}.
`benchmarks/gpu/predict.py` computes it. A line without one is a figure that no such sum gives.
An outcome comes from one run on a GPU; its page stands beside this one.

"""
COLUMNS = "| figure | at least | aim | prediction | outcome |\n|---|---|---|---|---|\n"
NOT_RUN = "No run yet: nothing here was measured.\n"


def page(result: dict[str, Any] | None = None, name: str = "") -> str:
    """The whole table.

    result: of a run on a GPU, whose page is called `name`; None before the first run.
    Raises:
        ValueError: The result is a trial's.
    """
    if result is not None and result["trial"]:
        raise ValueError("a trial's numbers are no outcomes")
    predicted, measured, said = predictions(), {}, NOT_RUN
    if result is not None:
        measured = values(result)
        said = (
            f"Measured on {result['machine']['name']} at {result['version']}: [{name}]({name}).\n"
        )
    lines = []
    for point, target in TARGETS.items():
        bounds = ["" if b is None else target.write(b) for b in (target.least, target.aim)]
        cells = [*bounds, target.write(predicted.get(point)), measured.get(point, "")]
        lines.append(f"| {target.title} | {' | '.join(cells)} |\n")
    return f"{HEAD}{said}\n{COLUMNS}{''.join(lines)}"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.log")
    parser.add_argument("run", nargs="?", type=Path, help="the JSON of a run on a GPU")
    run: Path | None = parser.parse_args(given).run
    try:
        if run is None:
            text = page()
        else:
            result = json.loads(run.read_text(encoding="utf-8"))
            text = page(result, run.with_suffix(".md").name)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    LOG.parent.mkdir(parents=True, exist_ok=True)
    LOG.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
