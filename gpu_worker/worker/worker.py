"""Claims, computes and finishes micro-batches in a GPU worker."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from nightjar.gpu_worker.worker.computing import BatchComputer, ComputedBatch
from nightjar.gpu_worker.worker.exclusive import ClosedError, SharedOrAlone
from nightjar.gpu_worker.worker.flights import (
    ComputeLostError,
    ComputeNotReadyError,
    LauncherError,
)
from nightjar.gpu_worker.worker.landing import Landing
from nightjar.gpu_worker.worker.served import ServedModel
from nightjar.gpu_worker.worker.status import worker_status
from nightjar.jobs.errors import StoreUnavailableError
from nightjar.jobs.records import ClaimedMicroBatch, NewResult, RequestError
from nightjar.jobs.store import Store
from nightjar.jobs.workers import ComputeSeconds, Crash
from nightjar.logs import about
from nightjar.pipeline.metrics import declarations as declared
from nightjar.pipeline.metrics.recording import recorder
from nightjar.pipeline.queue.liveness import owner_name
from nightjar.pipeline.tracing.tracer import traces
from nightjar.process import QuickSwitching

logger = logging.getLogger(__name__)

_TELL_MODELS_EVERY_S = 60.0
DONE, SKIPPED = "done", "skipped"
LEASE_LOST = "thrown away: the lease was lost"
CRASHED = "crashed: compute process lost"
GIVEN_BACK = "given back: not computed here"
NOT_BEGUN = "not begun: the worker ends"
OUTCOME_WORDS = {
    DONE: "done",
    SKIPPED: "skipped",
    LEASE_LOST: "lease_lost",
    CRASHED: "crashed",
    GIVEN_BACK: "given_back",
    NOT_BEGUN: "not_begun",
}
"""What metrics call each outcome."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a micro-batch; Flower shows it as the task's result."""

    outcome: str
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0


class GpuWorker:
    """Computes micro-batches for the Celery task; one a process, used by all its threads.

    Args:
        store: Holds the leases.
        models: What the worker serves; at least one. Suspects of one model have the whole worker
            alone: whatever dies meanwhile, only they can be the reason.
        crashes_allowed: A request that is computed alone fails after so many crashes.
        hung_after_beats: Heartbeats that may land while results are ready and do not land. After
            that the micro-batch is given back.
    """

    def __init__(
        self,
        store: Store,
        models: Sequence[ServedModel],
        *,
        crashes_allowed: int,
        hung_after_beats: int = 120,
    ) -> None:
        self.owner = owner_name()
        self._store = store
        self._models = {model.fingerprint: model for model in models}
        self._computers = {
            model.fingerprint: BatchComputer(
                store, model.launcher, model.name, model.cache, model.receipts
            )
            for model in models
        }
        self._tell_models_at = time.monotonic()
        self._crashes_allowed = crashes_allowed
        self._turn = SharedOrAlone()
        self._lock = threading.Lock()
        self._held: Counter[int] = Counter()
        self._running: dict[tuple[int, int], ClaimedMicroBatch] = {}
        self._landing = Landing(hung_after_beats)
        self._switching = QuickSwitching()

    def run(
        self, micro_batch: int, epoch: int, *, alone: bool = False, live: bool = False
    ) -> Outcome:
        """Claim a micro-batch, compute it, land its results.

        A message that came twice, or too late, finds nothing to claim and is skipped. A lease
        that an error leaves behind is given back with the next heartbeat.

        Args:
            micro_batch: The micro-batch's id.
            epoch: The epoch in the message.
            alone: Compute nothing else meanwhile. The worker waits for that before the claim. If
                it dies in that time, it has not held this micro-batch.
            live: It is a single call.
        """
        if live:  # its client waits: no thread that lands a micro-batch is to delay it
            self._switching.hurry()
        turn = self._turn.alone() if alone else self._turn.shared()
        try:
            with turn, self._holding(micro_batch):
                with traces.span("claim"), recorder.operation("claim") as timing:
                    batch = timing.found(
                        self._store.leases.claim(
                            micro_batch, epoch, self.owner, *self._models, live=live
                        )
                    )
                if batch is None:
                    return Outcome(SKIPPED)
                with about(job_id=batch.job_id, micro_batch=batch.id, worker=self.owner):
                    logger.debug(
                        "claimed micro-batch %d with %d requests",
                        batch.id,
                        len(batch.requests),
                        extra={"action": "claim", "kind": batch.kind.value, "bucket": batch.bucket},
                    )
                    return self._run(batch)
        except ClosedError:
            # Not claimed: requeued at once, so that another worker takes the message.
            sent = self._store.planning.dispatched()
            self._store.planning.requeue(
                [r for r in sent if (r.id, r.epoch) == (micro_batch, epoch)]
            )
            return Outcome(NOT_BEGUN)

    def stop_claiming(self) -> None:
        """Begin nothing more; what has begun goes on."""
        self._turn.close()

    def drain(self, grace_s: float) -> None:
        """Begin no more micro-batches, and give back those that still run after `grace_s` seconds.

        Micro-batches that wait for their turn are left to other workers at once, because they may
        take longer than the grace period. Results that the database has not taken by then are
        given up.
        """
        self.stop_claiming()
        time.sleep(grace_s)
        for model in self._models.values():
            model.launcher.release()
        self._landing.give_up()

    def beat(self) -> None:
        """Write a sign of life, and what the compute processes have spent."""
        spent = [model.launcher.totals.seconds for model in self._models.values()]
        seconds = ComputeSeconds(sum(s.engine_s for s in spent), sum(s.load_s for s in spent))
        with self._lock:
            running = list(self._running.values())
        status = worker_status(list(self._models.values()), running)
        self._store.heartbeats.beat(self.owner, seconds, status)

    def keep_alive(self) -> None:
        """Give back hanging and forgotten leases, write a sign of life, and say what is served.

        Raises:
            StoreError: The database is away, or a hanging lease cannot be given back. Then no sign
                of life is written, so that the sweeper takes this worker's leases.
        """
        self._switching.relax()
        for micro_batch, epoch in self._landing.hung():
            self._store.leases.give_back(micro_batch, epoch, self.owner)
        self.beat()
        if time.monotonic() >= self._tell_models_at:
            self._store.models.serve(self.owner, self._models)
            self._tell_models_at = time.monotonic() + _TELL_MODELS_EVERY_S
        self._landing.count_beat()
        self.give_back_leaked()

    def leave(self) -> None:
        """Give back every lease and write the last seconds; called when the launchers are closed.

        Without this beat, a run shorter than the time between two beats would show no seconds.
        """
        self._store.leases.give_back_all(self.owner)
        self._store.models.leave(self.owner)
        self.beat()

    def give_back_leaked(self) -> None:
        """Give back leases of this worker that no thread works on.

        An error, or a lost acknowledgement of the database, leaves such a lease. The sweeper takes
        leases only of dead workers.
        """
        for ref in self._store.leases.held_by(self.owner):
            # Read after the leases: a thread enters a micro-batch here before it claims it.
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
            with self._lock:
                self._running[batch.id, batch.epoch] = batch
            if batch.attempts > 1:
                recorder.count(declared.RETRIED)
            with traces.span("compute"), recorder.operation("compute"):
                computed = self._computers[batch.fingerprint].compute(batch)
            if computed.lost is not None:
                return self._after_crash(batch, computed.results, computed.lost)
            return self._land(batch, computed, time.monotonic() - started)
        except ComputeNotReadyError:
            self._store.leases.give_back(batch.id, batch.epoch, self.owner)
            return Outcome(GIVEN_BACK, requests=len(batch.requests))
        except (LauncherError, StoreUnavailableError):
            raise
        except Exception as error:
            # An error of the worker: fail these requests rather than compute them for ever.
            fault = RequestError("internal_error", f"the worker failed: {type(error).__name__}")
            self._store.leases.fail(batch.id, batch.epoch, self.owner, fault)
            raise
        finally:
            with self._lock:
                self._running.pop((batch.id, batch.epoch), None)

    def _after_crash(
        self, batch: ClaimedMicroBatch, answered: list[NewResult], lost: ComputeLostError
    ) -> Outcome:
        """Land the results that came, and make the other requests suspects."""
        crash = Crash(str(lost), self._crashes_allowed)
        held = self._landing.until_the_database_answers(
            batch,
            partial(self._store.suspects.add, batch.id, batch.epoch, self.owner, crash, answered),
        )
        recorder.count(declared.SUSPECTS, by=len(batch.requests) - len(answered))
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
        return Outcome(CRASHED if held else LEASE_LOST, requests=len(batch.requests))

    def _land(self, batch: ClaimedMicroBatch, computed: ComputedBatch, seconds: float) -> Outcome:
        results, model = computed.results, self._models[batch.fingerprint]
        lease = batch.id, batch.epoch, self.owner
        finish = partial(
            self._store.leases.finish, *lease, results, cost=computed.cost, live=batch.live
        )
        with traces.span("finish"), recorder.operation("finish"):
            landed = self._landing.until_the_database_answers(batch, finish)
        logger.debug(
            "results of micro-batch %d landed: %s", batch.id, landed, extra={"action": "finish"}
        )
        if landed:
            recorder.count(declared.COMPUTED, model.name, batch.kind.value, str(batch.bucket))
        cache = model.cache
        if landed and cache is not None:
            cache.keep(batch.requests, results, computed.precision)
            cache.keep_scores(computed.scores)
        return Outcome(
            outcome=DONE if landed else LEASE_LOST,
            requests=len(batch.requests),
            failed=sum(result.error is not None for result in results),
            prompt_tokens=sum(result.prompt_tokens for result in results),
            completion_tokens=sum(result.completion_tokens for result in results),
            seconds=round(seconds, 3),
        )
