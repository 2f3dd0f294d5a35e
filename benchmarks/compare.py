"""Nightjar and its peers on the same machine, in one run: `python -m benchmarks.compare`.

Every system runs in a process of its own and is stopped while another is measured.  The systems
alternate over several rounds; figures are medians.  A system does as much of a workload as it gets
done in about --budget-s seconds (`units` of `of` in the result); for the goals it is twelve times
that, and ours runs them whole.  A peer that is less than half as fast as the fastest peer is
measured in the first round only.  Writes `benchmarks/results/peers-<date>.json`;
`python -m benchmarks.report` puts it into docs/performance.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nightjar.checkpoints.tokenizer import Tokenizer

from . import own
from .environments import CACHE, ROOT
from .figures import (
    Measured,
    SystemRecord,
    agreement,
    first_token,
    median_first_token,
    ratios,
)
from .machine import describe
from .models import MEASURED, NEVER_GENERATED, SHAPES, save_model
from .peers.protocol import Generated, Generation, Outcome, Workload
from .systems import SYSTEMS, TRANSFORMERS, Runner, SystemFailedError
from .workloads import Sizes, Words, build

RESULTS = ROOT / "benchmarks" / "results"
COMPARED = ("generate", "rank", "rank_long", "catalogue", "multi_turn", "long_prompts")
EVERYONES = (*COMPARED, "first_token")
PROBE = {"generate": 8, "rank": 4, "first_token": 3}
"""Units that tell how much fits into the budget; they warm the system up as well."""
GOALS = ("generate", "rank")
GOALS_SHARE = 12
"""The workloads of the goals get this many budgets, and ours runs them whole: a part of them says
little of a system that keeps a full batch running."""
FAR_BEHIND = 0.5
REFERENCE = "transformers fp32"


@dataclass(frozen=True)
class Options:
    """One comparison."""

    models: list[str]
    systems: list[str]
    precisions: list[str]
    rounds: int
    scale: float
    budget_s: float
    threads: int


def reference_texts(model: Path, threads: int, logs: Path, asked: list[Generation]) -> Outcome:
    """Greedy texts of the reference system, without stops."""
    runner = Runner(TRANSFORMERS, "fp32", threads, logs / "reference.log")
    try:
        runner.load(model, CACHE / "converted" / model.name)
        answer = runner.run(Workload("reference", "generate", asked))
    finally:
        runner.close()
    return parse_outcome(answer["outcome"])


def parse_outcome(record: dict[str, Any]) -> Outcome:
    generated = [Generated(**item) for item in record["generated"]]
    return Outcome(generated, record["mean_nll"], record["seconds_each"])


def make_workloads(model: Path, sizes: Sizes, threads: int, logs: Path) -> dict[str, Workload]:
    """The workloads of a model, from the cache when they were made before."""
    source = (ROOT / "benchmarks" / "workloads.py").read_bytes()
    source += (ROOT / "benchmarks" / "models.py").read_bytes()
    key = hashlib.sha256(source + repr(sizes).encode()).hexdigest()[:16]
    file = CACHE / "workloads" / f"{model.name}-{key}.json"
    if not file.is_file():
        tokenizer = Tokenizer.read(model / "tokenizer.json", SHAPES[model.name].vocab_size)
        words = Words.of(tokenizer.token_bytes, NEVER_GENERATED)

        def reference(asked: list[Generation]) -> list[Generated]:
            return reference_texts(model, threads, logs, asked).generated

        made = build(words, sizes, reference)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps([workload.to_json() for workload in made.values()]))
    records = json.loads(file.read_text())
    return {record["name"]: Workload.from_json(record) for record in records}


class Contest:
    """The systems that stand against each other on one model."""

    def __init__(self, model: Path, options: Options, logs: Path) -> None:
        self._model, self._options, self._logs = model, options, logs
        self.records: list[SystemRecord] = []
        self._runners: dict[str, Runner] = {}

    def start(self) -> None:
        """Start and load every system; one that fails is kept with its reason."""
        for name in self._options.systems:
            spec = SYSTEMS[name]
            for precision in spec.precisions:
                if precision in self._options.precisions:
                    record = SystemRecord(name, precision, spec.ours)
                    self.records.append(record)
                    self._start(record)

    def _start(self, record: SystemRecord) -> None:
        spec = SYSTEMS[record.system]
        log = self._logs / f"{record.system}-{record.precision}.log"
        try:
            runner = Runner(spec, record.precision, self._options.threads, log)
        except SystemFailedError as error:
            record.failed = str(error)
        else:
            try:
                record.about = runner.load(self._model, CACHE / "converted" / self._model.name)
                record.about["environment"] = spec.environment
                self._runners[record.label] = runner
            except SystemFailedError as error:
                record.failed = str(error)
                runner.close()
        say(f"{record.label}: {record.failed or 'loaded'}")

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()

    def measure(self, workloads: dict[str, Workload]) -> None:
        """Every round: each workload, each system in turn, another one first each time."""
        for number in range(self._options.rounds):
            for workload in workloads.values():
                for record in self._in_turn(number, workload):
                    self._run(record, workload)

    def _in_turn(self, number: int, workload: Workload) -> Iterator[SystemRecord]:
        start = number % len(self.records)
        for record in self.records[start:] + self.records[:start]:
            if record.failed is None and self._takes_part(record, workload, number):
                yield record

    def _takes_part(self, record: SystemRecord, workload: Workload, number: int) -> bool:
        if workload.name in record.workload_failures:
            return False
        if record.system == "nightjar-run":
            return number == 0 and workload.name in ("generate", "rank")
        if workload.name not in EVERYONES:
            return record.ours
        if number == 0 or record.ours or workload.name not in COMPARED:
            return True
        peers = [peer for peer in self.records if not peer.ours and workload.name in peer.measured]
        fastest = max((peer.measured[workload.name].rate for peer in peers), default=0.0)
        return record.measured[workload.name].rate >= FAR_BEHIND * fastest

    def _run(self, record: SystemRecord, workload: Workload) -> None:
        runner = self._runners[record.label]
        try:
            if workload.name not in record.measured:
                units = self._units(record, runner, workload)
                record.measured[workload.name] = Measured(units, workload.units)
            measured = record.measured[workload.name]
            answer = runner.run(workload.head(measured.units))
        except SystemFailedError as error:
            record.workload_failures[workload.name] = str(error)
            record.measured.pop(workload.name, None)
            say(f"{workload.name}: {record.label}: {error}")
            return
        measured.seconds.append(answer["seconds"])
        record.peak_mib = answer["peak_mib"]
        outcome = parse_outcome(answer["outcome"])
        record.outcomes[workload.name] = outcome
        if workload.kind == "first_token":
            record.first_token.append(first_token(outcome.seconds_each))
        say(
            f"{workload.name}: {record.label}: {measured.units} of {measured.of} in "
            f"{answer['seconds']:.2f} s, {measured.units / answer['seconds']:.2f}/s"
        )

    def _units(self, record: SystemRecord, runner: Runner, workload: Workload) -> int:
        """How much of a workload this system does in the budget; figures that are ratios of two
        workloads need both whole."""
        if record.system == "nightjar-run":
            return workload.units
        units = PROBE[workload.kind]
        runner.run(workload.head(units))  # the first time compiles, allocates, packs
        seconds: float = runner.run(workload.head(units))["seconds"]
        if workload.name not in EVERYONES or (record.ours and workload.name in GOALS):
            return workload.units
        budget_s = self._options.budget_s * (GOALS_SHARE if workload.name in GOALS else 1)
        while units < workload.units and seconds < budget_s / 8:
            units = min(workload.units, 4 * units)
            seconds = runner.run(workload.head(units))["seconds"]
        fits = int(units * budget_s / seconds)
        return min(workload.units, max(PROBE[workload.kind], fits - fits % PROBE[workload.kind]))


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def record_figures(record: SystemRecord, reference: SystemRecord | None) -> dict[str, Any]:
    """A system's part of the result."""
    measured = {}
    for name, one in record.measured.items():
        entry: dict[str, Any] = {"units": one.units, "of": one.of, "rate": round(one.rate, 3)}
        entry["seconds"] = [round(seconds, 3) for seconds in one.seconds]
        texts = record.outcomes[name].generated
        if texts:
            entry["tokens_a_text"] = round(sum(text.tokens for text in texts) / len(texts), 1)
        if reference is not None and name in reference.outcomes and record is not reference:
            entry |= agreement(reference.outcomes[name], record.outcomes[name])
        measured[name] = entry
    figures: dict[str, Any] = {"system": record.system, "precision": record.precision}
    if record.failed is not None:
        return figures | {"failed": record.failed}
    figures |= record.about | {"peak_mib": round(record.peak_mib), "workloads": measured}
    if record.first_token:
        figures["first_token"] = median_first_token(record.first_token)
    if record.workload_failures:
        figures["workload_failures"] = record.workload_failures
    return figures


def compare_on(name: str, options: Options, logs: Path) -> dict[str, Any]:
    """The result of one model."""
    model = save_model(CACHE / "models" / name, SHAPES[name])
    sizes = Sizes().scaled(options.scale)
    workloads = make_workloads(model, sizes, options.threads, logs)
    contest = Contest(model, options, logs)
    try:
        contest.start()
        contest.measure(workloads)
    finally:
        contest.close()
    reference = next((r for r in contest.records if r.label == REFERENCE and not r.failed), None)
    found = ratios(contest.records, COMPARED)
    return {
        "shape": asdict(SHAPES[name]),
        "sizes": asdict(sizes),
        "ratios": {workload: best["ratio"] for workload, best in found["overall"].items()},
        "ratios_of": found,
        "engine": own.figures(contest.records, workloads, model, options.threads),
        "systems": {r.label: record_figures(r, reference) for r in contest.records},
    }


def words_of(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def parse(arguments: Sequence[str] | None) -> tuple[Options, Path | None]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=words_of, default=list(MEASURED))
    parser.add_argument("--systems", type=words_of, default=list(SYSTEMS))
    parser.add_argument("--precisions", type=words_of, default=["fp32", "bf16", "int8"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks every count of requests")
    parser.add_argument("--budget-s", type=float, default=8.0, help="seconds a system and workload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(arguments)
    for given, known in ((args.models, SHAPES), (args.systems, SYSTEMS)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"{', '.join(unknown)}: not among {', '.join(known)}")
    if args.rounds < 1 or args.budget_s <= 0 or not 0 < args.scale <= 1:
        parser.error("--rounds from 1, --budget-s above 0, --scale above 0 and at most 1")
    options = vars(args) | {}
    out = options.pop("out")
    return Options(**options), out


def main(arguments: Sequence[str] | None = None) -> None:
    options, out = parse(arguments)
    # The stopped runners must not outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    date = datetime.now(UTC).date().isoformat()
    RESULTS.mkdir(parents=True, exist_ok=True)
    logs = CACHE / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    machine, started = describe(options.threads), time.monotonic()
    models = {name: compare_on(name, options, logs) for name in options.models}
    result = {
        "date": date,
        "command": " ".join(["python -m benchmarks.compare", *(arguments or sys.argv[1:])]),
        "machine": machine,
        "options": asdict(options),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "ratios": models[options.models[0]]["ratios"],
        "models": models,
    }
    path = out or RESULTS / f"peers-{date}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    say(f"wrote {path}")
    print(json.dumps(result["ratios"], indent=2))


if __name__ == "__main__":
    main()
