"""Who runs in the next step."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.engine.kv_cache import BlockPool, BlockTable
from nightjar.gpu_worker.engine.plan import PrefixChunk, RankWork, StepPlan, TextWork
from nightjar.gpu_worker.engine.ranking import RankJob, RankPart
from nightjar.gpu_worker.engine.sequence import GenerateSequence, Prefix, TextJob

MAX_DEFERRED = 64
"""Waiting requests that are passed over in one step because others compute their prefix."""


class Opening(Enum):
    """Whether a prefix may start."""

    OPENED = auto()
    NO_BLOCKS = auto()
    PREFIX_UNDER_WAY = auto()


class Scheduler:
    """First come, first served within each kind, under the limits of places, rows and blocks.

    Running texts always take part.  What is left of the step's rows goes to prompts and rankings
    that have started, and then to the waiting ones in the order of arrival.  Prompts and queries
    are cut where the rows end.  One whose next block is just being computed for another waits for
    it: it then finds the block in the cache.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._texts: dict[TextJob, None] = {}
        self._rankings: dict[RankJob, None] = {}
        self._open: dict[TextJob | RankJob, None] = {}
        self._running: dict[GenerateSequence, None] = {}
        self._copies: list[tuple[int, int]] = []
        # The step being planned.
        self._rows = 0
        self._places = 0
        self._under_way: set[bytes] = set()

    def add(self, job: TextJob | RankJob) -> None:
        """Put a request at the end of its queue."""
        if isinstance(job, TextJob):
            self._texts[job] = None
        else:
            self._rankings[job] = None

    def schedule(self) -> StepPlan:
        """Plan one step and hold the blocks it writes."""
        plan = StepPlan(decodes=list(self._running))
        for sequence in plan.decodes:
            sequence.held.grow(sequence.length)
        self._rows = self._config.max_step_tokens - len(plan.decodes)
        self._places = self._config.max_running - len(plan.decodes)
        self._under_way.clear()
        for job in list(self._open):
            if self._rows > 0:
                self._advance(job, plan)
        self._admit(plan)
        return plan

    def settle(self, work: TextWork | RankWork) -> None:
        """Take note that a part of the plan was computed: what it wrote can be shared, and texts
        that got their first token run from now on."""
        if isinstance(work, TextWork):
            if work.chunk is not None:
                self._publish(work.chunk)
            for sequence in work.starts:
                self._start(sequence)
            if not work.job.waiting:
                work.job.prefix.drop()
                self._open.pop(work.job, None)
        else:
            for _, chunk in work.chunks:
                self._publish(chunk)

    def take_copies(self) -> list[tuple[int, int]]:
        """Blocks (source, copy) to copy before the next forward pass."""
        copies, self._copies = self._copies, []
        return copies

    def finish(self, sequence: GenerateSequence) -> None:
        """A running text has ended: free its place and its blocks."""
        del self._running[sequence]
        sequence.text.running.remove(sequence)
        sequence.held.free()
        sequence.table = None

    def close_parts(self, job: RankJob) -> None:
        """Free the prefixes whose documents need no more work."""
        needed = set(map(id, job.waiting.values()))
        for part in job.parts:
            if id(part) not in needed:
                part.prefix.drop()

    def remove(self, job: TextJob | RankJob) -> None:
        """Forget a request, wherever it is, and free its blocks."""
        self._open.pop(job, None)
        if isinstance(job, RankJob):
            self._rankings.pop(job, None)
            for part in job.parts:
                part.prefix.drop()
            return
        self._texts.pop(job, None)
        for sequence in list(job.running):
            self.finish(sequence)
        job.prefix.drop()

    def _admit(self, plan: StepPlan) -> None:
        """Let waiting requests in, in the order of arrival, while there is room."""
        deferred = 0
        for job in self._waiting():
            first = job.prefix if isinstance(job, TextJob) else job.parts[0].prefix
            opening = self._open_prefix(first)
            if opening is Opening.NO_BLOCKS:
                # Nobody overtakes: smaller ones would take, one by one, the blocks it waits for.
                return
            if opening is Opening.PREFIX_UNDER_WAY:
                deferred += 1
                if deferred == MAX_DEFERRED:
                    return
                continue
            if isinstance(job, TextJob):
                del self._texts[job]
            else:
                del self._rankings[job]
            self._open[job] = None
            self._advance(job, plan)

    def _waiting(self) -> Iterator[TextJob | RankJob]:
        """Waiting requests by arrival, as long as there are rows, and for texts places."""
        texts, rankings = iter(list(self._texts)), iter(list(self._rankings))
        text, ranking = next(texts, None), next(rankings, None)
        while self._rows > 0:
            if self._places <= 0:
                text = None
            if text is not None and (ranking is None or text.arrival < ranking.arrival):
                yield text
                text = next(texts, None)
            elif ranking is not None:
                yield ranking
                ranking = next(rankings, None)
            else:
                return

    def _advance(self, job: TextJob | RankJob, plan: StepPlan) -> None:
        """Give a request that has started its part of the step."""
        if isinstance(job, TextJob):
            self._advance_text(job, plan)
        else:
            self._advance_ranking(job, plan)

    def _advance_text(self, job: TextJob, plan: StepPlan) -> None:
        """The next chunk of a prompt; its samples, once it is complete and while places last."""
        chunk = self._cut(job.prefix, plan)
        starts = []
        if job.prefix.is_computed or (chunk is not None and chunk.finishes):
            starts = [job.waiting.popleft() for _ in range(min(self._places, len(job.waiting)))]
        # A prompt under way holds a place, or its text could not start when it is complete.
        self._places -= max(1, len(starts))
        if chunk is not None or starts:
            plan.texts.append(TextWork(job, chunk, starts))

    def _advance_ranking(self, job: RankJob, plan: StepPlan) -> None:
        """The next chunks of a ranking's prefixes, and looks at the documents behind them."""
        work = RankWork(job, [], [])
        plan.ranks.append(work)
        ready = []
        for part in job.parts:
            if not any(document in job.waiting for document in part.documents):
                continue
            if not self._advance_prefix(part, work, plan):
                break
            if part.prefix.is_computed or (work.chunks and work.chunks[-1][1].finishes):
                ready.append(part)
        for branch in job.candidates(ready):
            cost = len(branch.fed)
            if cost > self._rows and _has_rows(plan):
                break
            self._rows -= cost
            work.branches.append(branch)
        if not work.chunks and not work.branches:
            plan.ranks.pop()

    def _advance_prefix(self, part: RankPart, work: RankWork, plan: StepPlan) -> bool:
        """The next chunk of a part's prefix, if one is due; False where it must wait."""
        prefix = part.prefix
        if prefix.is_computed:
            return True
        if self._rows <= 0:
            return False
        if prefix.table is None and self._open_prefix(prefix) is not Opening.OPENED:
            return False
        chunk = self._cut(prefix, plan)
        if chunk is None:
            return False
        work.chunks.append((part, chunk))
        return True

    def _open_prefix(self, prefix: Prefix) -> Opening:
        """Reserve a prefix's blocks, taking from the cache what it knows."""
        # What a scored token or the next one is predicted from is computed here in any case.
        usable = prefix.keys[: (prefix.scored_from - 1) // self._pool.block_size]
        known = self._pool.find(usable)
        if len(known) < len(usable) and usable[len(known)] in self._under_way:
            return Opening.PREFIX_UNDER_WAY
        own = prefix.max_blocks - len(known)
        if not self._pool.reserve(own, known):
            return Opening.NO_BLOCKS
        prefix.table = BlockTable(self._pool, own, known)
        prefix.computed = len(known) * self._pool.block_size
        return Opening.OPENED

    def _cut(self, prefix: Prefix, plan: StepPlan) -> PrefixChunk | None:
        """As much of a prefix as the rows allow; cut short, it ends with a block."""
        start, size = prefix.computed, self._pool.block_size
        end = min(len(prefix.tokens), start + max(0, self._rows))
        if end < len(prefix.tokens):
            whole = end // size * size
            if whole <= start and (_has_rows(plan) or end <= start):
                return None
            end = whole if whole > start else end
        elif start == end:
            return None
        prefix.held.grow(end)
        self._rows -= end - start
        self._under_way.update(prefix.keys[start // size : end // size])
        return PrefixChunk(prefix, start, end)

    def _publish(self, chunk: PrefixChunk) -> None:
        """Let others find the whole blocks of a chunk that was computed."""
        prefix, size = chunk.prefix, self._pool.block_size
        prefix.computed = chunk.end
        for place in range(chunk.start // size, chunk.end // size):
            self._pool.publish(prefix.held.blocks[place], prefix.keys[place])

    def _start(self, sequence: GenerateSequence) -> None:
        """Give a text that got its first token its own blocks."""
        job = sequence.text
        prefix = job.prefix
        if job.request.sampling.n == 1:
            sequence.table, prefix.table = prefix.held, None
        else:
            length = len(prefix.tokens)
            own = self._pool.blocks_for(job.max_length) - length // self._pool.block_size
            sequence.table, copy = prefix.held.fork(length, own)
            if copy is not None:
                self._copies.append(copy)
        job.running.append(sequence)
        self._running[sequence] = None


def _has_rows(plan: StepPlan) -> bool:
    """Whether anything joins the running texts."""
    return any(plan.chunks) or bool(plan.branches)
