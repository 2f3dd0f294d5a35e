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
        rows = self._config.max_step_tokens - len(plan.decodes)
        if self._ranking_is_older():
            rows = self._admit_rankings(plan, rows)
            self._admit_texts(plan, rows)
        else:
            rows = self._admit_texts(plan, rows)
            self._admit_rankings(plan, rows)
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

    def _admit_texts(self, plan: StepPlan, rows: int) -> int:
        """Move waiting texts into the step; returns the rows left."""
        places = self._config.max_running - len(self._running)
        while self._waiting and rows > 0 and len(plan.prefills) < places:
            head = self._waiting[0]
            cost = len(head.prompt)
            if cost > rows and plan.admits_any:
                break
            head.table = BlockTable.reserve(self._pool, head.max_cached)
            if head.table is None:
                break
            head.table.grow(cost)
            plan.prefills.append(self._waiting.popleft())
            rows -= cost
        return rows

    def _admit_rankings(self, plan: StepPlan, rows: int) -> int:
        """Give rankings rows in order, cutting the last one where they end; returns those left.

        None are left for texts when a query waits for blocks: texts would take, one by one, the
        blocks it waits for.
        """
        for sequence in self._rankings:
            cost = 0 if sequence.query_hidden is not None else len(sequence.query)
            first = len(sequence.documents[sequence.next_document])
            if rows <= 0 or (cost + first > rows and plan.admits_any):
                break
            if sequence.table is None:
                sequence.table = BlockTable.reserve(self._pool, len(sequence.query))
                if sequence.table is None:
                    return 0
                sequence.table.grow(len(sequence.query))
            piece, used = _cut(sequence, rows - cost)
            plan.ranks.append(piece)
            rows -= cost + used
        return rows


def _cut(sequence: RankSequence, rows: int) -> tuple[RankPiece, int]:
    """The documents of a ranking that fit into these rows, one at least, and their rows."""
    end, used = sequence.next_document, 0
    for document in sequence.documents[sequence.next_document :]:
        if used and used + len(document) > rows:
            break
        used += len(document)
        end += 1
    return RankPiece(sequence, sequence.next_document, end), used
