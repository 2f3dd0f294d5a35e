"""What an engine counts: plain numbers, which other processes turn into metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from nightjar.gpu_worker.engine.kv_cache import BlockPool
    from nightjar.gpu_worker.engine.plan import StepOutput, StepPlan
    from nightjar.gpu_worker.engine.scheduler import Scheduler

Item = TypeVar("Item")

PHASES = ("receive", "schedule", "prefill", "decode", "rank", "mixed", "process", "recompute")
"""Where the time of a step goes. Four of them are forward passes, named by what they compute."""

CONTENTS = PHASES[2:6]
"""What a forward pass computes: prompts, running sequences, rankings, or several of these."""


def _zeros(names: tuple[str, ...]) -> dict[str, float]:
    return dict.fromkeys(names, 0.0)


@dataclass(slots=True)
class EngineCounters:
    """Numbers that only grow in the life of an engine.

    phase_s: seconds by phase; steps: forward passes by what they compute. A window of decode steps
        on a GPU counts each of its steps.
    prefill_tokens: rows of prompts that were computed; rank_tokens: those of queries and documents.
    decode_tokens: tokens chosen.
    prefix_tokens: tokens of the prefixes that were started; cached_tokens: those of them that the
        prefix cache held.
    sequence_steps: sequences that got a token, summed over steps; slot_steps: slots, likewise.
    padded_rows: rows that are computed for nobody: empty slots of a window, and the padding of
        documents in attention.
    documents: of ended rankings; pruned_documents: those of them that could not be among the best.
    recomputed: requests that were computed again in a higher precision.
    """

    phase_s: dict[str, float] = field(default_factory=lambda: _zeros(PHASES))
    steps: dict[str, float] = field(default_factory=lambda: _zeros(CONTENTS))
    prefill_tokens: int = 0
    rank_tokens: int = 0
    decode_tokens: int = 0
    prefix_tokens: int = 0
    cached_tokens: int = 0
    sequence_steps: int = 0
    slot_steps: int = 0
    padded_rows: int = 0
    documents: int = 0
    pruned_documents: int = 0
    recomputed: int = 0

    def plus(self, other: EngineCounters) -> EngineCounters:
        """Return the sum of the counts of two engines."""
        sums: dict[str, object] = {}
        for name in self.__dataclass_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            sums[name] = (
                {key: value + theirs.get(key, 0.0) for key, value in mine.items()}
                if isinstance(mine, dict)
                else mine + theirs
            )
        return EngineCounters(**sums)  # type: ignore[arg-type]


@dataclass(slots=True)
class EngineGauges:
    """Numbers of the moment.

    running: sequences that decode; slots: how many may; waiting: requests that have not started.
    blocks: of the cache; held_blocks: of running requests; resting_blocks: of the prefix cache
        alone; reserved_blocks: promised to running requests and not drawn yet.
    """

    running: int = 0
    slots: int = 0
    waiting: int = 0
    blocks: int = 0
    held_blocks: int = 0
    resting_blocks: int = 0
    reserved_blocks: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """All numbers of an engine."""

    counters: EngineCounters = field(default_factory=EngineCounters)
    gauges: EngineGauges = field(default_factory=EngineGauges)


class Meter:
    """Counts the steps of one engine."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._counters = EngineCounters()

    def read(self, scheduler: Scheduler, pool: BlockPool, arriving: int) -> EngineStatistics:
        """Return all numbers; arriving: requests that the scheduler has not seen yet."""
        prefill = scheduler.prefill
        counters = replace(
            self._counters,
            phase_s=dict(self._counters.phase_s),
            steps=dict(self._counters.steps),
            prefix_tokens=prefill.started_tokens,
            cached_tokens=prefill.cached_tokens,
        )
        gauges = EngineGauges(
            running=scheduler.running_count,
            slots=self._slots,
            waiting=arriving + scheduler.waiting_count,
            blocks=pool.total,
            held_blocks=pool.total - len(pool.unheld),
            resting_blocks=len(pool.resting),
            reserved_blocks=pool.reserved,
        )
        return EngineStatistics(counters, gauges)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._counters.phase_s[name] += time.perf_counter() - started

    def timed(self, name: str, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the items; add the time that they take to a phase."""
        while True:
            with self.phase(name):
                item = next(items, None)
            if item is None:
                return
            yield item

    def planned(self, plan: StepPlan) -> str:
        """Count the rows of a plan; return what it computes, one of CONTENTS."""
        counters, content = self._counters, plan.content
        counters.steps[content] += 1
        for prompt in plan.prompts:
            if prompt.chunk is not None:
                counters.prefill_tokens += prompt.chunk.end - prompt.chunk.start
        for rank in plan.ranks:
            counters.rank_tokens += sum(chunk.end - chunk.start for _, chunk in rank.chunks)
            for branch in rank.branches:
                counters.rank_tokens += branch.depth - 1
                counters.padded_rows += branch.padding
        return content

    def windowed(self, sequences: int, slots: int) -> None:
        """Count one decode step that a device took in a window of so many slots."""
        self._counters.steps["decode"] += 1
        self._counters.padded_rows += slots - sequences

    def stepped(self, output: StepOutput) -> None:
        """Count the tokens of a step."""
        if output.tokens:
            self._counters.decode_tokens += len(output.tokens)
            self._counters.sequence_steps += len(output.tokens)
            self._counters.slot_steps += self._slots

    def ranked(self, documents: int, pruned: int) -> None:
        """Count the documents of a ranking that has ended."""
        self._counters.documents += documents
        self._counters.pruned_documents += pruned

    def recomputes(self) -> None:
        """Count a request that is computed again in a higher precision."""
        self._counters.recomputed += 1
