"""Nightjar and its peers on the same machine, in one run: `python -m benchmarks.compare`.

Every system runs in a process of its own and is stopped while another is measured.  The systems
alternate over several rounds; figures are medians.  Ours runs every workload whole.  A peer runs
as much as it gets done in about --budget-s seconds, and no less than fills its batches (`units` of
`of` in the result).  After the first round the two fastest peers of each precision go on, and only
the workloads of the goals are run more than twice.  Writes `benchmarks/results/peers-<date>.json`
after every workload, so that a run that is cut short leaves what it has (`rounds_done`); what the
file holds of other models stays.  `python -m benchmarks.report` puts it into docs/performance.md.
"""

import hashlib
import json
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec
import torch

from . import own
from .contest import COMPARED, EVERYONES, OURS, Contest, say
from .figures import ratios, record_figures
from .harness import CACHE, RESULTS, ROOT, Figures, arguments, begun, write_json, write_whole
from .machine import describe, has_bf16
from .models import cached_model
from .peers.protocol import Generated, Generation, Workload
from .systems import SYSTEMS, TRANSFORMERS, Runner
from .weights import MEASURED, SHAPES
from .workloads import Sizes, build

REFERENCE = "transformers fp32"
LOGS = CACHE / "logs"
WORKLOADS = [*EVERYONES, *OURS]
PRECISIONS = ["fp32", "bf16", "int8"]
OPTIONS = {
    "--models": (list(MEASURED), "shapes of models", SHAPES),
    "--systems": (list(SYSTEMS), "what is compared", SYSTEMS),
    "--precisions": (PRECISIONS if has_bf16() else ["fp32", "int8"], "of weights", PRECISIONS),
    "--workloads": (WORKLOADS, "what they do", WORKLOADS),
    "--rounds": (3, "how often"),
    "--scale": (1.0, "shrinks every count of requests"),
    "--budget-s": (8.0, "seconds a peer and workload"),
    "--threads": (2, "of each system"),
    "--apart": (False, "one precision after another, where not all fit into memory together"),
}


def reference_texts(model: Path, threads: int, asked: list[Generation]) -> list[Generated]:
    """Greedy texts of the reference system, without stops."""
    runner = Runner(TRANSFORMERS, "fp32", threads, LOGS / "reference.log")
    try:
        runner.load(model)
        return runner.run(Workload("reference", asked)).outcome.generated
    finally:
        runner.close()


def make_workloads(name: str, model: Path, sizes: Sizes, threads: int) -> dict[str, Workload]:
    """The workloads of a model, from the cache when they were made before."""
    source = (ROOT / "benchmarks" / "workloads.py").read_bytes()
    key = hashlib.sha256(source + repr(sizes).encode()).hexdigest()[:16]
    file = CACHE / "workloads" / f"{model.name}-{key}.json"
    if not file.is_file():
        made = build(SHAPES[name].words, sizes, partial(reference_texts, model, threads))
        write_whole(file, msgspec.json.encode(made).decode())
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Workload])


def compare_on(name: str, options: Namespace, keep: Callable[[Figures], None]) -> None:
    """Measure one model; `keep` gets its result after every workload, better each time."""
    model = cached_model(name)
    sizes = Sizes().scaled(options.scale)
    made = make_workloads(name, model, sizes, options.threads)
    workloads = {key: one for key, one in made.items() if key in options.workloads}
    contest = Contest(model, LOGS, options.threads, options.budget_s)

    def result() -> Figures:
        records = contest.records
        reference = next((r for r in records if r.label == REFERENCE and not r.failed), None)
        return {
            "shape": asdict(SHAPES[name]),
            "sizes": asdict(sizes),
            "rounds_done": contest.rounds_done,
            "ratios_of": ratios(records, COMPARED),
            "ratios_by_token": ratios(records, COMPARED, by_token=True),
            "engine": own.figures(records, workloads, model),
            "systems": {r.label: record_figures(r, reference, workloads) for r in records},
        }

    together = [options.precisions]
    for precisions in [[one] for one in options.precisions] if options.apart else together:
        try:
            contest.start(options.systems, precisions)
            contest.measure(workloads, options.rounds, lambda: keep(result()))
        finally:
            contest.close()


def add_to(path: Path, name: str, run: Figures, started: float, model: Figures) -> None:
    """Put a model's result, and how it was run, into a result file beside what is there."""
    models = json.loads(path.read_text())["models"] if path.is_file() else {}
    minutes = round((time.monotonic() - started) / 60, 1)
    models[name] = {**run, "minutes": minutes, **model}
    write_json(path, {"date": run["date"], "models": models})


def main(given: Sequence[str] | None = None) -> None:
    options = arguments("compare", __doc__, OPTIONS, given)
    torch.set_num_threads(options.threads)  # own.figures computes in this process
    # The stopped runners must not outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    about = begun("compare", given)
    path = options.out or RESULTS / f"peers-{about['date']}.json"
    about |= {"options": {name: one for name, one in vars(options).items() if name != "out"}}
    LOGS.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        run = about | {"machine": describe(options.threads)}
        compare_on(name, options, partial(add_to, path, name, run, time.monotonic()))
        say(f"{name}: wrote {path}")


if __name__ == "__main__":
    main()
