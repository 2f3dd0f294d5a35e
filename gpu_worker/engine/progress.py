"""Applies the results of a step to requests, up to the requests' results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nightjar.gpu_worker.engine.beam_search import search_step
from nightjar.gpu_worker.engine.beams import BeamState
from nightjar.gpu_worker.engine.ranking import RankJob
from nightjar.gpu_worker.engine.requests import GenerateOutput, GenerateResult, RankResult
from nightjar.gpu_worker.engine.scheduler import Scheduler
from nightjar.gpu_worker.engine.sequence import Choice, GenerateJob, GenerateSequence
from nightjar.gpu_worker.engine.statistics import Meter

Moved = tuple[GenerateSequence, Choice]
"""A sequence and its next token."""


class Progress:
    """Adds tokens to sequences and probes to rankings, and returns the results of ended requests.

    The caller frees the blocks of an ended request.
    """

    def __init__(self, scheduler: Scheduler, token_bytes: Sequence[bytes], meter: Meter) -> None:
        self._scheduler = scheduler
        self._meter = meter
        self._token_bytes = token_bytes

    def of_sequences(self, tokens: Iterable[Moved]) -> Iterator[GenerateResult]:
        """Add tokens to sequences; return the results of the requests that end."""
        searches: dict[GenerateJob, list[Moved]] = {}
        for sequence, choice in tokens:
            job = sequence.job
            if job.beams is not None:
                searches.setdefault(job, []).append((sequence, choice))
                continue
            self._append(sequence, choice)
            if not job.waiting and not job.running:
                yield _answer(job, [output for _, output in sorted(job.finished.items())])
        for job, beams in searches.items():
            if job.beams is not None and not self._search(job, job.beams, beams):
                best = job.beams.finished[: job.request.sampling.n]
                yield _answer(job, [finished.output for finished in best])

    def of_rankings(self, jobs: Iterable[RankJob]) -> Iterator[RankResult]:
        """Drop documents that cannot be among the best any more.

        Returns the results of rankings in which no document waits.
        """
        for job in jobs:
            job.prune()
            self._scheduler.close_parts(job)
            if not job.waiting:
                query, scores = len(job.request.query_ids), job.scores()
                self._meter.ranked(len(scores), scores.count(None))
                yield RankResult(
                    job.request_id,
                    scores,
                    job.token_counts,
                    query,
                    cached_tokens=job.cached_tokens,
                    pruned_tokens=job.pruned_tokens,
                )

    def _append(self, sequence: GenerateSequence, choice: Choice) -> None:
        """Add a token to a sequence, and end the sequence if the token ends it."""
        if choice.logprobs is not None:
            sequence.logprobs.append(choice.logprobs)
        ending = sequence.add(choice.token, self._token_bytes[choice.token])
        if ending is not None:
            sequence.job.finished[sequence.sample] = sequence.output(ending)
            self._scheduler.finish(sequence)

    def _search(
        self, job: GenerateJob, state: BeamState[GenerateOutput], beams: list[Moved]
    ) -> bool:
        """Advance the sequences of a beam search together; return whether the search continues."""
        children = search_step(state, beams, self._token_bytes)
        if children:
            self._scheduler.replace_beams(job, children)
        return bool(children)


def _answer(job: GenerateJob, outputs: list[GenerateOutput]) -> GenerateResult:
    """Return the result of a generation request."""
    prefix = job.prefix
    return GenerateResult(job.request_id, outputs, len(prefix.tokens), cached_tokens=prefix.cached)
