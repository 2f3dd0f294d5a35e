"""Systems that stand against each other on one model: who runs what, how much of it, how often."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from .figures import Measured, SystemRecord
from .peers.protocol import Workload
from .systems import SYSTEMS, Runner, SystemFailedError, SystemSpec

COMPARED = ("generate", "rank", "rank_long", "catalogue", "multi_turn", "long_prompts")
EVERYONES = (*COMPARED, "first_token")
_PAIRS = ("mixed_lengths", "even_lengths", "short_answers", "full_answers")
OURS = (*_PAIRS, "prefill_only", "decode_from", "decode_to")
"""Workloads of our engine alone."""


@dataclass(frozen=True)
class Part:
    """How much of a workload a peer runs.

    probe: units that tell how much fits into the budget; they warm the system up as well.
    least: units that it runs at least: a smaller part would not fill its batches.
    budgets: how many it gets.
    """

    probe: int
    least: int
    budgets: int = 1


PARTS = {
    "generate": Part(8, 48, budgets=3),
    "first_token": Part(3, 12),
    "rank_long": Part(4, 16),  # where every document costs a peer 530 tokens
}
TEXTS, RANKINGS = Part(8, 48), Part(4, 48)
"""Of the workloads that are not in PARTS."""
WHOLE = 3
"""Budgets that a peer may take to end with a whole ranking: one that computes a query once for all
of its documents would else be timed on a query for a few of them."""
WARMED = ("generate", "rank")
"""Run once as they are measured, and not counted, by every system in every round. At the first use
of its memory a process waits for the machine to find it. Memory that it has not used for half an
hour may serve something else by then, where the machine is a virtual one."""
EVERY_ROUND = ("generate", "rank", *_PAIRS)
OTHER_ROUNDS = 2
"""Rounds of the workloads that are not in EVERY_ROUND."""
GOING_ON = 2
"""Peers of each precision that run a workload again after its first round."""
LONG_S = 30.0
"""What took this long is not run again: it is steady enough."""


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Contest:
    """Starts the systems, gives them work, keeps what came of it in `records`."""

    def __init__(self, model: Path, logs: Path, threads: int, budget_s: float) -> None:
        self._model, self._logs = model, logs
        self._threads, self._budget_s = threads, budget_s
        self.records: list[SystemRecord] = []
        self.rounds_done = 0
        self._runners: dict[str, Runner] = {}

    def start(self, systems: list[str], precisions: list[str]) -> None:
        """Start and load every system, to be measured until `close`; one that fails is kept with
        its reason."""
        for spec in (SYSTEMS[name] for name in systems):
            for precision in (one for one in spec.precisions if one in precisions):
                self._start(spec, SystemRecord(spec.name, precision, spec.ours))

    def add(self, record: SystemRecord, runner: Runner | None) -> None:
        """Let a system take part; one without a runner is reported and not measured."""
        self.records.append(record)
        if runner is not None:
            self._runners[record.label] = runner

    def _start(self, spec: SystemSpec, record: SystemRecord) -> None:
        runner = None
        log = self._logs / f"{record.system}-{record.precision}.log"
        try:
            runner = Runner(spec, record.precision, self._threads, log)
            loaded = runner.load(self._model)
            record.about = {
                "versions": loaded.versions,
                "settings": loaded.settings,
                "start_mib": loaded.peak_mib,
            }
        except SystemFailedError as error:
            record.failed = str(error)
            if runner is not None:
                runner.close()
        self.add(record, None if record.failed else runner)
        say(f"{record.label}: {record.failed or 'loaded'}")

    def close(self) -> None:
        """End what was started; what was measured stays."""
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()

    def measure(
        self, workloads: dict[str, Workload], rounds: int, keep: Callable[[], None]
    ) -> None:
        """Every round: each workload, each system in turn, another one first each time.

        keep is called after every workload, to save what is known so far.
        """
        for number in range(rounds):
            start = number % len(self.records)
            in_turn = self.records[start:] + self.records[:start]
            for place, workload in enumerate(workloads.values(), 1):
                taking_part = [r for r in in_turn if self._takes_part(r, workload.name, number)]
                for record in taking_part:
                    self._run(record, workload)
                self.rounds_done = number + (place == len(workloads))
                keep()

    def _takes_part(self, record: SystemRecord, name: str, number: int) -> bool:
        if record.label not in self._runners or name in record.workload_failures:
            return False
        if not record.ours and name not in EVERYONES:
            return False
        if number == 0:
            return True
        if number >= OTHER_ROUNDS and name not in EVERY_ROUND:
            return False
        if median(record.measured[name].seconds) > LONG_S:
            return False
        rivals = [r for r in self.records if not r.ours and r.precision == record.precision]
        measured = [r for r in rivals if name in r.measured]
        fastest = sorted(measured, key=lambda peer: -peer.measured[name].rate)
        return record.ours or record in fastest[:GOING_ON]

    def _run(self, record: SystemRecord, workload: Workload) -> None:
        runner = self._runners[record.label]
        try:
            if workload.name not in record.measured:
                units = self._units(record, runner, workload)
                record.measured[workload.name] = Measured(units, workload.units)
            measured = record.measured[workload.name]
            if workload.name in WARMED:
                runner.run(workload.head(measured.units))
            ran = runner.run(workload.head(measured.units))
        except SystemFailedError as error:
            record.workload_failures[workload.name] = str(error)
            record.measured.pop(workload.name, None)
            say(f"{workload.name}: {record.label}: {error}")
            return
        measured.seconds.append(ran.seconds)
        measured.outcomes.append(ran.outcome)
        record.peak_mib = ran.peak_mib
        say(
            f"{workload.name}: {record.label}: {measured.units} of {measured.of} in "
            f"{ran.seconds:.2f} s, {measured.units / ran.seconds:.2f}/s"
        )

    def _units(self, record: SystemRecord, runner: Runner, workload: Workload) -> int:
        """How much of a workload this system runs: ours all, a peer what fits the budget."""
        part = PARTS.get(workload.name, RANKINGS if workload.rankings else TEXTS)
        runner.run(workload.head(part.probe))  # the first time compiles, allocates, packs
        if record.ours:
            return workload.units
        seconds_each = runner.run(workload.head(part.probe)).seconds / part.probe
        budget_s = self._budget_s * part.budgets
        fits = int(budget_s / seconds_each)
        units = min(workload.units, max(part.least, fits - fits % part.probe))
        whole = workload.whole(units)
        return whole if whole * seconds_each <= WHOLE * budget_s else units
