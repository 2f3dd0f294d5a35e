"""Computes the requests of a claimed micro-batch: sends them, waits, turns answers into results."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from nightjar import __version__
from nightjar.gpu_worker.compute import messages
from nightjar.gpu_worker.worker.answers import Computed, make_message, make_result
from nightjar.gpu_worker.worker.flights import ComputeLostError, InFlight
from nightjar.gpu_worker.worker.known_scores import Ranking, rankings
from nightjar.gpu_worker.worker.launcher import Launcher
from nightjar.gpu_worker.worker.receipts import Receipts
from nightjar.gpu_worker.worker.resident_vectors import VectorsMissingError
from nightjar.jobs.errors import StoreUnavailableError
from nightjar.jobs.records import CachedScore, ClaimedMicroBatch, ClaimedRequest, NewResult
from nightjar.jobs.states import Reuse
from nightjar.jobs.store import Store
from nightjar.jobs.tallies import ComputeCost
from nightjar.jobs.vector_records import VectorFile
from nightjar.pipeline.planning.reuse import ResultCache

logger = logging.getLogger(__name__)

_CANCEL_LOOK_S = 1.0
_DIGESTS = 4096  # of prompt vectors; more than the micro-batches of all threads name

Message = messages.Generate | messages.Rank


@dataclass(frozen=True, slots=True)
class ComputedBatch:
    """The outcome of computing a micro-batch.

    results: the outcomes that came.
    precision: the precision of the model.
    scores: scores of documents for the cache.
    lost: why the other outcomes will not come; None where all came.
    cost: what computing took.
    """

    results: list[NewResult]
    precision: str
    scores: list[CachedScore]
    cost: ComputeCost
    lost: ComputeLostError | None = None


class BatchComputer:
    """Computes claimed micro-batches; used by several threads at once.

    Args:
        store: Holds the prompt vectors, and knows whether a job was cancelled.
        launcher: Owns the compute process.
        model: The model's name in answers.
        cache: Holds scores of earlier jobs; None where results are not reused.
    """

    def __init__(
        self,
        store: Store,
        launcher: Launcher,
        model: str,
        cache: ResultCache | None,
        receipts: Receipts | None = None,
    ) -> None:
        self._store = store
        self._launcher = launcher
        self._model = model
        self._cache = cache
        self._receipts = receipts
        self._vector_digest = lru_cache(_DIGESTS)(self._read_vector_digest)

    def compute(self, batch: ClaimedMicroBatch) -> ComputedBatch:
        """Compute the requests that no earlier job has answered.

        Raises:
            LauncherError: No compute process can be had, or this worker ends.
            StoreUnavailableError: The database is away before the compute process was asked.
        """
        if self._receipts is not None:  # before computing: the database may be away afterwards
            for key in {key for one in batch.requests for key in (one.prompt_vector, one.adapter)}:
                if key is not None:
                    self._vector_digest(key)
        results, asked = self._messages(batch)
        precision = self._launcher.precision
        by = Computed(self._model, precision)
        known = {} if self._cache is None else rankings(asked, self._cache, precision)
        answered, asked = self._shortened(asked, known, by)
        results += answered
        flight = self._submit([message for _, message in asked])
        self._wait(batch, flight)
        scores: list[CachedScore] = []
        if flight.lost is not None and not isinstance(flight.lost, ComputeLostError):
            raise flight.lost
        for (request, _), ticket in zip(asked, flight.tickets, strict=True):
            answer = flight.answers.get(ticket)
            # After a cancel, answers are missing without a loss: the store fails those requests.
            if answer is not None:
                results.append(self._result(request, answer, by, known.get(request.id)))
                if request.id in known and isinstance(answer, messages.Ranked):
                    scores += known[request.id].computed(answer)
        return ComputedBatch(results, precision, scores, _cost(flight, precision), flight.lost)

    def _messages(
        self, batch: ClaimedMicroBatch
    ) -> tuple[list[NewResult], list[tuple[ClaimedRequest, Message]]]:
        """Return failures of requests that give no message, and the others with their messages."""
        failed: list[NewResult] = []
        asked: list[tuple[ClaimedRequest, Message]] = []
        for request in batch.requests:
            try:
                ticket = self._launcher.next_ticket()
                asked.append((request, make_message(request, ticket, urgent=batch.live)))
            except Exception as error:
                logger.exception(
                    "request %d cannot be asked",
                    request.id,
                    extra={"action": "request_unreadable", "request": request.id},
                )
                failed.append(_our_fault(request, error))
        return failed, asked

    def _shortened(
        self,
        asked: Sequence[tuple[ClaimedRequest, Message]],
        known: Mapping[int, Ranking],
        by: Computed,
    ) -> tuple[list[NewResult], list[tuple[ClaimedRequest, Message]]]:
        """Return the results of rankings that the cache answers, and the requests to compute."""
        results: list[NewResult] = []
        left: list[tuple[ClaimedRequest, Message]] = []
        for request, message in asked:
            ranking = known.get(request.id)
            rest = message if ranking is None else ranking.rest
            if rest is not None:
                left.append((request, rest))
            elif ranking is not None:
                result = self._result(request, ranking.whole(None), by)
                reused = None if result.error else Reuse.CACHE
                results.append(msgspec.structs.replace(result, reused=reused))
        return results, left

    def _result(
        self,
        request: ClaimedRequest,
        answer: messages.Answer,
        by: Computed,
        known: Ranking | None = None,
    ) -> NewResult:
        """Return the result of an answer; `known` holds the scores that were not computed."""
        try:
            reused = 0
            if known is not None and isinstance(answer, messages.Ranked):
                answer, reused = known.whole(answer), known.reused_documents
            result = make_result(request, answer, by, reused)
            return self._receipted(result, request, by.precision)
        except Exception as error:  # the other requests have their answers
            logger.exception(
                "the answer of request %d cannot be read",
                request.id,
                extra={"action": "answer_unreadable", "request": request.id},
            )
            return _our_fault(request, error)

    def _submit(self, asked: Sequence[Message]) -> InFlight:
        """Send the requests, with the prompt vectors and adapters that the process lacks."""
        requests = [message.request for message in asked]
        named = {one.prompt_vectors for one in requests} | {one.adapter for one in requests}
        keys = {key for key in named if key is not None}
        files: dict[str, VectorFile] = {}
        while True:  # at most once a key, unless the process is replaced
            missing = self._launcher.missing_vectors(keys - files.keys())
            if missing:
                # An unknown key has no data: the engine refuses the requests that name it.
                files |= dict.fromkeys(missing, VectorFile(b"")) | self._store.vectors.data(missing)
            try:
                return self._launcher.submit(asked, keys, files)
            except VectorsMissingError:
                continue

    def _receipted(self, result: NewResult, request: ClaimedRequest, precision: str) -> NewResult:
        """Return the result, with a receipt where receipts are asked for."""
        if self._receipts is not None:
            named = {key for key in (request.prompt_vector, request.adapter) if key is not None}
            digests = {key: self._vector_digest(key) for key in named}
            self._receipts.add(result, request, precision, digests)
        return result

    def _read_vector_digest(self, key: str) -> str | None:
        """Return the digest of the vectors or adapter "name@version"; None if there are none."""
        found = self._store.vectors.resolve([key]).get(key)
        return None if found is None else found.sha256

    def _wait(self, batch: ClaimedMicroBatch, flight: InFlight) -> None:
        """Wait for all answers; when the job is stopped, cancel the missing ones."""
        while not flight.done.wait(_CANCEL_LOOK_S):
            try:
                stopped = self._store.jobs.is_stopped(batch.job_id)
            except StoreUnavailableError:
                continue  # computing continues without the database
            if stopped:
                self._launcher.cancel(flight)


def _cost(flight: InFlight, precision: str) -> ComputeCost:
    """Return what the flight took, for reports."""
    answers = [one for one in flight.answers.values() if not isinstance(one, messages.Failed)]
    ranked = [one for one in answers if isinstance(one, messages.Ranked)]
    return ComputeCost(
        engine_s=flight.engine_s,
        steps=flight.steps,
        cached_tokens=sum([one.cached_tokens for one in answers]),
        pruned_tokens=sum([one.pruned_tokens for one in ranked]),
        pruned_documents=sum([one.mean_nll.count(None) for one in ranked]),
        precision=precision,
        version=__version__,
    )


def _our_fault(request: ClaimedRequest, error: Exception) -> NewResult:
    """Return the failure of a request that raised in the worker; it holds nothing of its text."""
    fault = f"the worker failed: {type(error).__name__}"
    return NewResult.failure(request.id, "internal_error", fault, status=500)
