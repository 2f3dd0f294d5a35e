"""Who runs in the next step."""

from __future__ import annotations

from collections import deque

from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.engine.kv_cache import BlockPool, BlockTable
from nightjar.gpu_worker.engine.sequence import (
    GenerateSequence,
    RankPiece,
    RankSequence,
    StepPlan,
)


class Scheduler:
    """First come, first served within each kind, under the limits of places, rows and blocks.

    Running texts always take part.  What is left of the step's rows goes to the kind whose head
    has waited longer, then to the other.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._waiting: deque[GenerateSequence] = deque()
        self._rankings: deque[RankSequence] = deque()
        self._running: list[GenerateSequence] = []

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._running or self._waiting or self._rankings)

    def add(self, sequence: GenerateSequence | RankSequence) -> None:
        """Put a request at the end of its queue."""
        if isinstance(sequence, GenerateSequence):
            self._waiting.append(sequence)
        else:
            self._rankings.append(sequence)

    def schedule(self) -> StepPlan:
        """Plan one step and hold the blocks it writes."""
        plan = StepPlan([], list(self._running), [])
        for sequence in plan.decodes:
            if sequence.table is not None:
                sequence.table.grow(sequence.length)
        budget = self._config.max_step_tokens - len(plan.decodes)
        if self._ranking_is_older():
            budget = self._admit_rankings(plan, budget)
            self._admit_texts(plan, budget)
        else:
            budget = self._admit_texts(plan, budget)
            self._admit_rankings(plan, budget)
        self._running.extend(plan.prefills)
        return plan

    def remove(self, sequence: GenerateSequence | RankSequence) -> None:
        """Forget a request, wherever it is, and free its blocks."""
        if isinstance(sequence, RankSequence):
            self._rankings.remove(sequence)
        elif sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        if sequence.table is not None:
            sequence.table.free()
            sequence.table = None

    def _ranking_is_older(self) -> bool:
        """Whether the first ranking came before the first waiting text."""
        if not self._rankings or not self._waiting:
            return False
        return self._rankings[0].arrival < self._waiting[0].arrival

    def _admit_texts(self, plan: StepPlan, budget: int) -> int:
        """Move waiting texts into the step; returns the rows left."""
        places = self._config.max_running - len(self._running)
        while self._waiting and len(plan.prefills) < places:
            head = self._waiting[0]
            cost = len(head.prompt)
            if cost > budget and plan:
                break
            head.table = BlockTable.reserve(self._pool, head.max_cached)
            if head.table is None:
                break
            head.table.grow(cost)
            plan.prefills.append(self._waiting.popleft())
            budget -= cost
        return budget

    def _admit_rankings(self, plan: StepPlan, budget: int) -> int:
        """Give rankings rows in order, cutting the last one where the rows end."""
        for sequence in self._rankings:
            cost = 0 if sequence.query_hidden is not None else len(sequence.query)
            first = sequence.next_document
            if cost + len(sequence.documents[first]) > budget and plan:
                break
            if sequence.table is None:
                sequence.table = BlockTable.reserve(self._pool, len(sequence.query))
                if sequence.table is None:
                    break
                sequence.table.grow(len(sequence.query))
            end = first
            while end < len(sequence.documents):
                rows = len(sequence.documents[end])
                if end > first and cost + rows > budget:
                    break
                cost += rows
                end += 1
            plan.ranks.append(RankPiece(sequence, first, end))
            budget -= cost
        return budget
