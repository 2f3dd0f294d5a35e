"""Decides which requests take part in the next step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nightjar.gpu_worker.engine.beam_search import Child
from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.engine.forks import Forks
from nightjar.gpu_worker.engine.host_tier import HostTier
from nightjar.gpu_worker.engine.kv_cache import BlockPool
from nightjar.gpu_worker.engine.plan import Job, PrefixChunk, PromptWork, RankWork, StepPlan
from nightjar.gpu_worker.engine.prefill import Opening, Prefill
from nightjar.gpu_worker.engine.ranking import RankJob, RankPart
from nightjar.gpu_worker.engine.sequence import GenerateJob, GenerateSequence, Prefix

MAX_DEFERRED = 64
"""Most waiting requests that one step skips because others compute their prefix."""


class Scheduler:
    """First come, first served within each kind, under the limits of slots, rows and blocks.

    Urgent requests go before all others, and have slots that no other request takes.

    Running sequences always take part.  The other rows of a step go to prompts and rankings that
    have started, and then to waiting ones in the order of arrival.  Prompts and queries are cut
    where the rows end.  A started request holds the slots it needs, so a wide beam search waits
    only for sequences that run already.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, tier: HostTier | None = None) -> None:
        self._config = config
        self._generations: dict[GenerateJob, None] = {}
        self._rankings: dict[RankJob, None] = {}
        self._open: dict[Job, None] = {}
        self._running: dict[GenerateSequence, None] = {}
        self.prefill = Prefill(pool, tier)
        self._forks = Forks(pool)
        # Of the step being planned.
        self._rows = 0
        self._slots = 0
        self._urgent_slots = 0

    def add(self, job: Job) -> None:
        """Put a request at the end of its queue; an urgent one behind the other urgent ones."""
        if isinstance(job, GenerateJob):
            self._generations[job] = None
            if job.request.urgent:
                self._generations = dict.fromkeys(sorted(self._generations, key=_order))
        else:
            self._rankings[job] = None
            if job.request.urgent:
                self._rankings = dict.fromkeys(sorted(self._rankings, key=_order))

    def schedule(self) -> StepPlan:
        """Plan one step and hold the blocks it writes."""
        plan = self.decode(self.running)
        self._rows = self._config.max_step_tokens - len(plan.decodes)
        self._slots = self._config.slots - len(plan.decodes)
        self._urgent_slots = self._config.urgent_slots + min(0, self._slots)
        self.prefill.new_step()
        for job in sorted(self._open, key=_is_ordinary):
            if self._rows > 0:
                self._advance(job, plan)
        self._admit(plan)
        return plan

    def decode(self, running: Sequence[GenerateSequence]) -> StepPlan:
        """Plan the next token of running sequences alone, and hold the blocks that it writes."""
        for sequence in running:
            sequence.held.grow(sequence.length)
        return StepPlan(decodes=list(running))

    def settle(self, work: PromptWork | RankWork) -> None:
        """Note that a part of the plan was computed.

        Its blocks can be shared, and sequences that got their first token run from now on.
        """
        if isinstance(work, RankWork):
            for _, chunk in work.chunks:
                self.prefill.publish(chunk)
            return
        job = work.job
        if work.chunk is not None:
            self.prefill.publish(work.chunk)
        if work.starts:
            self.prefill.publish_beginnings(job.prefix)
        for sequence in work.starts:
            self._forks.start(sequence)
            job.running.append(sequence)
            self._running[sequence] = None
        if not job.waiting:
            job.prefix.drop()
            self._open.pop(job, None)

    @property
    def has_waiting(self) -> bool:
        """Whether a request could start or continue, if there were room."""
        return bool(self._generations or self._rankings or self._open)

    @property
    def waiting_count(self) -> int:
        """How many requests have not started."""
        return len(self._generations) + len(self._rankings)

    @property
    def running_count(self) -> int:
        """How many sequences decode."""
        return len(self._running)

    @property
    def running(self) -> list[GenerateSequence]:
        """The sequences that decode a token in every step."""
        return list(self._running)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return blocks (source, copy), which are all copied before the next forward pass."""
        # A prefix may have got the block of a fork that has ended.
        copies = self._forks.take_copies() | self.prefill.take_copies()
        return [(source, copy) for copy, source in copies.items()]

    def finish(self, sequence: GenerateSequence) -> None:
        """Free the slot and the blocks of a running sequence that has ended."""
        del self._running[sequence]
        sequence.job.running.remove(sequence)
        sequence.held.free()
        sequence.table = None

    def replace_beams(self, job: GenerateJob, children: Sequence[Child]) -> None:
        """Replace the sequences of a search by their children."""
        self._forks.replace(job, children)
        for sequence in job.running:
            del self._running[sequence]
        job.running = [child for _, child in children]
        self._running.update(dict.fromkeys(job.running))

    def close_parts(self, job: RankJob) -> None:
        """Free the prefixes whose documents need no more work."""
        needed = set(map(id, job.waiting.values()))
        for part in job.parts:
            if id(part) not in needed:
                part.prefix.drop()

    def remove(self, job: Job) -> None:
        """Drop a request from every queue, and free its blocks."""
        self._open.pop(job, None)
        if isinstance(job, RankJob):
            self._rankings.pop(job, None)
            for part in job.parts:
                part.prefix.drop()
            return
        self._generations.pop(job, None)
        for sequence in list(job.running):
            self.finish(sequence)
        if job.spare is not None:
            job.spare.free()
        job.prefix.drop()

    def _admit(self, plan: StepPlan) -> None:
        """Start waiting requests in the order of arrival, while there is room."""
        deferred = 0
        for job in self._waiting():
            first = job.prefix if isinstance(job, GenerateJob) else job.parts[0].prefix
            match self.prefill.open(first):
                case Opening.NO_BLOCKS:
                    return
                case Opening.PREFIX_UNDER_WAY:
                    deferred += 1
                    if deferred == MAX_DEFERRED:
                        return
                case Opening.OPENED:
                    self._open[job] = None
                    if isinstance(job, GenerateJob):
                        del self._generations[job]
                    else:
                        del self._rankings[job]
                    self._advance(job, plan)

    def _waiting(self) -> Iterator[Job]:
        """Yield waiting requests by arrival, while there are rows and, for sequences, slots."""
        generations, rankings = iter(list(self._generations)), iter(list(self._rankings))
        generation, ranking = next(generations, None), next(rankings, None)
        while self._rows > 0:
            if generation is not None and self._slots_for(generation) <= 0:
                generation = None
            if generation is not None and (ranking is None or generation.order < ranking.order):
                yield generation
                generation = next(generations, None)
            elif ranking is not None:
                yield ranking
                ranking = next(rankings, None)
            else:
                return

    def _slots_for(self, job: GenerateJob) -> int:
        """Return the slots that this request may take in this step."""
        if job.request.urgent:
            return max(0, self._slots) + self._urgent_slots
        return self._slots

    def _take_slots(self, job: GenerateJob, count: int) -> None:
        """Note that a request holds slots in this step."""
        if job.request.urgent:
            beyond = max(0, count - max(0, self._slots))
            self._urgent_slots -= beyond
            count -= beyond
        self._slots -= count

    def _advance(self, job: Job, plan: StepPlan) -> None:
        """Plan the part of a started request in this step."""
        if isinstance(job, GenerateJob):
            self._advance_generation(job, plan)
        else:
            self._advance_ranking(job, plan)

    def _advance_generation(self, job: GenerateJob, plan: StepPlan) -> None:
        """Plan the next chunk of a prompt; when it is complete, also samples, while slots last."""
        chunk = self._cut(job.prefix, plan)
        # The sequences of a beam search run all together or not at all.
        needed = 1 if job.beams is None else job.request.sampling.width
        starts = []
        if job.prefix.is_computed or (chunk is not None and chunk.finishes):
            count = min(max(0, self._slots_for(job)) // needed, len(job.waiting))
            starts = [job.waiting.popleft() for _ in range(count)]
        # A started prompt holds a slot, so that its sequence can start when it is complete.
        self._take_slots(job, needed * max(1, len(starts)))
        if chunk is not None or starts:
            plan.prompts.append(PromptWork(job, chunk, starts))

    def _advance_ranking(self, job: RankJob, plan: StepPlan) -> None:
        """Plan the next chunks of a ranking's prefixes, and probes of the documents after them."""
        work = RankWork(job, [], [])
        plan.ranks.append(work)
        for branch in job.candidates(self._ready_parts(work, plan)):
            cost = len(branch.fed)
            if cost > self._rows and plan.has_joined:
                break
            self._rows -= cost
            work.branches.append(branch)
        if not work.chunks and not work.branches:
            plan.ranks.pop()

    def _ready_parts(self, work: RankWork, plan: StepPlan) -> list[RankPart]:
        """Continue a ranking's prefixes; return the parts whose documents can be probed."""
        ready = []
        needed = set(map(id, work.job.waiting.values()))
        for part in work.job.parts:
            if id(part) not in needed:
                continue
            prefix = part.prefix
            if not prefix.is_computed:
                chunk = self._next_chunk(prefix, plan)
                if chunk is None:
                    break
                work.chunks.append((part, chunk))
                if not chunk.finishes:
                    break
            ready.append(part)
        return ready

    def _next_chunk(self, prefix: Prefix, plan: StepPlan) -> PrefixChunk | None:
        """Return the next chunk of a part's prefix, or None where it must wait."""
        if self._rows <= 0:
            return None
        if prefix.table is None and self.prefill.open(prefix) is not Opening.OPENED:
            return None
        return self._cut(prefix, plan)

    def _cut(self, prefix: Prefix, plan: StepPlan) -> PrefixChunk | None:
        """Return as much of a prefix as the step's rows allow."""
        chunk = self.prefill.cut(prefix, self._rows, alone=not plan.has_joined)
        if chunk is not None:
            self._rows -= chunk.end - chunk.start
        return chunk


def _order(job: Job) -> tuple[bool, int]:
    return job.order


def _is_ordinary(job: Job) -> bool:
    return not job.request.urgent
