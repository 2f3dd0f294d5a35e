"""What a GPU worker does with one micro-batch: claim, compute, finish; and its heartbeat."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from nightjar.gpu_worker import messages
from nightjar.gpu_worker.answers import Computed, make_message, make_result
from nightjar.gpu_worker.gate import Gate, GateClosedError
from nightjar.gpu_worker.known_scores import Ranking, rankings
from nightjar.gpu_worker.launcher import (
    ComputeLostError,
    ComputeNotReadyError,
    InFlight,
    Launcher,
    LauncherError,
)
from nightjar.jobs.errors import StoreError, StoreUnavailableError
from nightjar.jobs.records import (
    CachedScore,
    ClaimedMicroBatch,
    ClaimedRequest,
    Crash,
    NewResult,
    RequestError,
    Reuse,
)
from nightjar.jobs.store import Store
from nightjar.pipeline.liveness import owner_name
from nightjar.pipeline.reuse import ResultCache

logger = logging.getLogger(__name__)

_CANCEL_LOOK_S = 1.0
_STORE_RETRY_S = 1.0
LEASE_LOST = "thrown away: the lease was lost"

Message = messages.Generate | messages.Rank


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a micro-batch; Flower shows it as the task's result."""

    outcome: str
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Computed:
    """The outcomes that came; `lost` says why the others will not come, if they will not.

    scores: what was computed of rankings and is to be kept.
    """

    results: list[NewResult]
    precision: str
    scores: list[CachedScore]
    lost: ComputeLostError | None = None


class GpuWorker:
    """Computes micro-batches for the Celery task; one a process, used by all its threads.

    Args:
        store: Where leases are.
        launcher: The compute process.
        model: The name that answers carry.
        fingerprint: Of the model that is served; what was planned for another is not claimed.
        crashes_allowed: So many crashes of a request that was computed alone make it fail.
        cache: Keeps answers for later jobs, if they are to be reused.
        hung_after_beats: So many heartbeats land, and the results of a micro-batch still do not:
            it is given back.
    """

    def __init__(
        self,
        store: Store,
        launcher: Launcher,
        *,
        model: str,
        fingerprint: str = "",
        crashes_allowed: int,
        cache: ResultCache | None = None,
        hung_after_beats: int = 120,
    ) -> None:
        self.owner = owner_name()
        self._store = store
        self._launcher = launcher
        self._model = model
        self._fingerprint = fingerprint
        self._crashes_allowed = crashes_allowed
        self._cache = cache
        self._gate = Gate()
        self._lock = threading.Lock()
        self._held: Counter[int] = Counter()
        self._landing: Counter[tuple[int, int]] = Counter()  # beats while results waited to land
        self._hung_after_beats = hung_after_beats
        self._drained = threading.Event()

    def run(self, micro_batch: int, epoch: int, *, alone: bool = False) -> Outcome:
        """Claim a micro-batch, compute it, land its results.

        A message that came twice, or too late, finds nothing to claim and is skipped. A lease
        that an error leaves behind goes back with the next heartbeat. `alone` keeps the compute
        process free of anything else; it is waited for before the claim, so that a worker that
        dies meanwhile has not held this micro-batch.
        """
        gate = self._gate.alone() if alone else self._gate.together()
        try:
            with gate, self._holding(micro_batch):
                batch = self._store.leases.claim(micro_batch, epoch, self.owner, self._fingerprint)
                return Outcome("skipped") if batch is None else self._run(batch)
        except GateClosedError:
            # Not claimed: its message is sent again at once, to others.
            sent = self._store.planning.dispatched()
            self._store.planning.requeue(
                [r for r in sent if (r.id, r.epoch) == (micro_batch, epoch)]
            )
            return Outcome("not begun: the worker ends")

    def drain(self, grace_s: float) -> None:
        """Begin nothing more; after `grace_s` seconds, give back what is still being computed.

        Returns then. What waits for its turn, suspects above all, is left to other workers at
        once: it may take longer than anybody gives a process to end. Results that the database has
        not taken by then are given up.
        """
        self._gate.close()
        time.sleep(grace_s)
        self._launcher.release()
        self._drained.set()

    def beat(self) -> None:
        """Write a sign of life, and what the compute processes have spent."""
        self._store.heartbeats.beat(self.owner, self._launcher.seconds)

    def keep_alive(self) -> None:
        """Give back what hangs or was left behind, and write a sign of life.

        Raises:
            StoreError: The database is away, or a lease that hangs cannot be given back: there is
                no sign of life then, so that the leases of this worker age.
        """
        with self._lock:
            hung = [key for key, n in self._landing.items() if n >= self._hung_after_beats]
        for micro_batch, epoch in hung:
            logger.error(
                "results of micro-batch %d did not land while %d heartbeats did: given back",
                micro_batch,
                self._hung_after_beats,
                extra={"action": "finish_hangs", "micro_batch": micro_batch},
            )
            self._store.leases.give_back(micro_batch, epoch, self.owner)
        self.beat()
        with self._lock:
            for key in self._landing:
                self._landing[key] += 1
        self.give_back_leaked()

    def leave(self) -> None:
        """The worker ends, its launcher is closed: give back every lease, write the last seconds.

        Without this beat, a run shorter than the time between two would show no seconds.
        """
        self._store.leases.give_back_all(self.owner)
        self.beat()

    def give_back_leaked(self) -> None:
        """Give back what this worker holds in SQL and no thread works on.

        An error, or an acknowledgement of the database that got lost, leaves such a lease; the
        sweeper leaves it alone as long as the worker lives.
        """
        for ref in self._store.leases.held_by(self.owner):
            # Looked up after the reading: a thread holds a micro-batch from before its claim.
            if not self._held[ref.id]:
                self._store.leases.give_back(ref.id, ref.epoch, self.owner)

    @contextmanager
    def _holding(self, micro_batch: int) -> Iterator[None]:
        with self._lock:
            self._held[micro_batch] += 1  # two messages of one micro-batch may be here at once
        try:
            yield
        finally:
            with self._lock:
                self._held[micro_batch] -= 1
                if not self._held[micro_batch]:
                    del self._held[micro_batch]

    def _run(self, batch: ClaimedMicroBatch) -> Outcome:
        started = time.monotonic()
        try:
            computed = self._compute(batch)
            if computed.lost is not None:
                return self._after_crash(batch, computed.results, computed.lost)
            return self._land(batch, computed, time.monotonic() - started)
        except ComputeNotReadyError:
            self._store.leases.give_back(batch.id, batch.epoch, self.owner)
            return Outcome("given back: not computed here", requests=len(batch.requests))
        except (LauncherError, StoreUnavailableError):
            raise
        except Exception as error:
            # A fault of ours: end these requests with it rather than compute them for ever.
            fault = RequestError("internal_error", f"the worker failed: {type(error).__name__}")
            self._store.leases.fail(batch.id, batch.epoch, self.owner, fault)
            raise

    def _compute(self, batch: ClaimedMicroBatch) -> _Computed:
        for key in {request.prompt_vector for request in batch.requests} - {None}:
            self._register_vectors(str(key))
        results, asked = _messages(batch.requests)
        precision = self._launcher.precision
        known = {} if self._cache is None else rankings(asked, self._cache, precision)
        answered, asked = self._shortened(asked, known, precision)
        results += answered
        flight = self._launcher.submit([partial(_with_ticket, message) for _, message in asked])
        self._wait(batch, flight)
        scores: list[CachedScore] = []
        if flight.lost is not None and not isinstance(flight.lost, ComputeLostError):
            raise flight.lost
        for (request, _), ticket in zip(asked, flight.tickets, strict=True):
            answer = flight.answers.get(ticket)
            # Where there is none and none was lost, the store writes that it was cancelled.
            if answer is not None:
                results.append(self._result(request, answer, precision, known.get(request.id)))
                if request.id in known and isinstance(answer, messages.Ranked):
                    scores += known[request.id].computed(answer)
        return _Computed(results, precision, scores, flight.lost)

    def _shortened(
        self,
        asked: Sequence[tuple[ClaimedRequest, Message]],
        known: Mapping[int, Ranking],
        precision: str,
    ) -> tuple[list[NewResult], list[tuple[ClaimedRequest, Message]]]:
        """The results of rankings of which all is known, and what is left to ask."""
        results: list[NewResult] = []
        left: list[tuple[ClaimedRequest, Message]] = []
        for request, message in asked:
            ranking = known.get(request.id)
            rest = message if ranking is None else ranking.rest
            if rest is not None:
                left.append((request, rest))
            elif ranking is not None:
                result = self._result(request, ranking.whole(None), precision)
                reused = None if result.error else Reuse.CACHE
                results.append(msgspec.structs.replace(result, reused=reused))
        return results, left

    def _result(
        self,
        request: ClaimedRequest,
        answer: messages.Answer,
        precision: str,
        known: Ranking | None = None,
    ) -> NewResult:
        """The result of an answer, to what was not known if something was."""
        try:
            reused = 0
            if known is not None and isinstance(answer, messages.Ranked):
                answer, reused = known.whole(answer), known.reused_documents
            return make_result(request, answer, Computed(self._model, precision), reused)
        except Exception as error:  # its neighbours have their answers
            logger.exception(
                "the answer of request %d cannot be read",
                request.id,
                extra={"action": "answer_unreadable", "request": request.id},
            )
            return _our_fault(request, error)

    def _register_vectors(self, key: str) -> None:
        name, _, version = key.rpartition("@")
        vectors = self._store.vectors.get(name, int(version))
        if vectors is not None:  # else the engine refuses the requests that name it
            self._launcher.register_vectors(key, vectors.data)

    def _wait(self, batch: ClaimedMicroBatch, flight: InFlight) -> None:
        """Wait for all answers; leave the rest uncomputed when the job is stopped."""
        while not flight.done.wait(_CANCEL_LOOK_S):
            try:
                stopped = self._store.jobs.is_stopped(batch.job_id)
            except StoreUnavailableError:
                continue  # the computing goes on without the database
            if stopped:
                self._launcher.cancel(flight)

    def _after_crash(
        self, batch: ClaimedMicroBatch, answered: list[NewResult], lost: ComputeLostError
    ) -> Outcome:
        """What was answered lands; the rest are suspects."""
        crash = Crash(str(lost), self._crashes_allowed)
        held = self._until_the_database_answers(
            batch,
            partial(self._store.suspects.add, batch.id, batch.epoch, self.owner, crash, answered),
        )
        logger.warning(
            "micro-batch %d crashed with %d requests unanswered: %s",
            batch.id,
            len(batch.requests) - len(answered),
            lost,
            extra={
                "action": "micro_batch_crashed",
                "micro_batch": batch.id,
                "job_id": batch.job_id,
                "alone": batch.isolated,
            },
        )
        return Outcome(
            "crashed: compute process lost" if held else LEASE_LOST, requests=len(batch.requests)
        )

    def _land(self, batch: ClaimedMicroBatch, computed: _Computed, seconds: float) -> Outcome:
        results = computed.results
        landed = self._until_the_database_answers(
            batch, partial(self._store.leases.finish, batch.id, batch.epoch, self.owner, results)
        )
        if landed and self._cache is not None:
            self._cache.keep(batch.requests, results, computed.precision)
            self._cache.keep_scores(computed.scores)
        return Outcome(
            outcome="done" if landed else LEASE_LOST,
            requests=len(batch.requests),
            failed=sum(result.error is not None for result in results),
            prompt_tokens=sum(result.prompt_tokens for result in results),
            completion_tokens=sum(result.completion_tokens for result in results),
            seconds=round(seconds, 3),
        )

    def _until_the_database_answers(
        self, batch: ClaimedMicroBatch, write: Callable[[], bool]
    ) -> bool:
        """A database that is away or full is waited for, for as long as the worker may live.

        Raises:
            StoreUnavailableError: The worker is to end, and its grace period is over.
        """
        with self._landing_of(batch):
            return self._write_until_it_lands(batch, write)

    @contextmanager
    def _landing_of(self, batch: ClaimedMicroBatch) -> Iterator[None]:
        key = batch.id, batch.epoch
        with self._lock:
            self._landing[key] = 0
        try:
            yield
        finally:
            with self._lock:
                del self._landing[key]

    def _write_until_it_lands(self, batch: ClaimedMicroBatch, write: Callable[[], bool]) -> bool:
        while True:
            try:
                return write()
            except StoreUnavailableError as error:
                if self._drained.is_set():
                    raise
                logger.warning(
                    "results of micro-batch %d wait for the database: %s",
                    batch.id,
                    error,
                    extra={"action": "finish_waits", "micro_batch": batch.id},
                )
                self._drained.wait(_STORE_RETRY_S)


def _messages(
    requests: Sequence[ClaimedRequest],
) -> tuple[list[NewResult], list[tuple[ClaimedRequest, Message]]]:
    """What the compute process is asked, without tickets; a request that cannot be asked fails."""
    failed: list[NewResult] = []
    asked: list[tuple[ClaimedRequest, Message]] = []
    for request in requests:
        try:
            asked.append((request, make_message(request, 0)))
        except Exception as error:
            logger.exception(
                "request %d cannot be asked",
                request.id,
                extra={"action": "request_unreadable", "request": request.id},
            )
            failed.append(_our_fault(request, error))
    return failed, asked


def _with_ticket(message: Message, ticket: int) -> Message:
    return msgspec.structs.replace(message, ticket=ticket)


def _our_fault(request: ClaimedRequest, error: Exception) -> NewResult:
    """The outcome of a request that raised in the worker; the message holds nothing of its text."""
    fault = f"the worker failed: {type(error).__name__}"
    return NewResult.failure(request.id, "internal_error", fault, status=500)


class Heartbeat:
    """Raises a worker's counter in SQL, so that the sweeper knows that it lives."""

    def __init__(self, worker: GpuWorker, every_s: float) -> None:
        self._worker = worker
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End after the beat in progress."""
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stop.is_set():
            try:
                self._worker.keep_alive()
            except StoreError as error:
                # The lease may be lost meanwhile; the fence at finish decides, not we.
                logger.warning("no heartbeat: %s", error, extra={"action": "heartbeat_failed"})
            self._stop.wait(self._every_s)
