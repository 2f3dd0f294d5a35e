"""Plan: turn queued requests into micro-batches, one chunk in one transaction.

The job is chosen again for each chunk (pipeline/planning/turns.py): models take turns, then
tenants, and of a tenant's jobs the first by rank goes. So an urgent job waits for at most one chunk
of a bulk job of its tenant and model. A chunk is bounded in requests, bytes and tokens.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

from nightjar.groups import in_groups
from nightjar.jobs.errors import StoreError, StoreUnavailableError
from nightjar.jobs.records import (
    EncodedRequest,
    JobToPlan,
    NewResult,
    PlanningRange,
    QueuedRequest,
    RequestError,
)
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.pipeline.planning.agreement import plans_with
from nightjar.pipeline.planning.encode import Encoder
from nightjar.pipeline.planning.models import PlanningModel, PlanningModels
from nightjar.pipeline.planning.pack import Packable, pack
from nightjar.pipeline.planning.turns import Turns
from nightjar.pipeline.queue.liveness import owner_name
from nightjar.pipeline.settings import Settings
from nightjar.pipeline.tracing.tracer import traces

logger = logging.getLogger(__name__)


# Bytes tokenized at once: tokenizing takes up to a hundred times the memory of its text.
_ENCODE_BYTES = 1 << 20
_BACK_OFF_S = 1.0  # after the first failure; twice as long after each further one
_LONGEST_BACK_OFF_S = 60.0
_LOOK_AGAIN_S = 0.2  # at rows that others have taken: they may leave some
# A tenant that has so many windows of micro-batches ready yields to others.
_WINDOWS_AHEAD = 4
_DIED = "the planner ended while it planned the job"

Refused = list[tuple[int, RequestError]]


@dataclass(frozen=True, slots=True)
class _Planned:
    """What became of a part of a chunk.

    encoded_tokens: Of its requests' prompts.
    packed_tokens: Of its micro-batches; answers that were kept take none.
    """

    requests: int
    encoded_tokens: int
    packed_tokens: int


class Planner:
    """Plans jobs for the models that this deployment serves.

    To plan a row twice at once is harmless, because the store takes each request once. It is only
    wasteful, so a process plans in one thread, and each takes a range of rows before it reads them.

    Args:
        settings: The budgets of a chunk and of a micro-batch.
        store: Where the jobs are.
        models: What the jobs are planned for.
        clock: Monotonic seconds.
        owner: Unique name of this planner, as `liveness.owner_name` makes it.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        models: PlanningModels,
        clock: Callable[[], float] = time.monotonic,
        owner: str | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._models = models
        self.owner = owner or owner_name()
        self.plans_with = plans_with(settings, models)
        self._is_known = False  # to other planners
        self._holds_range = False
        self._others_plan = False
        self._turns = Turns(store.backlog, models, _WINDOWS_AHEAD * settings.dispatch_window)
        self._clock = clock
        self._counted: set[str] = set()  # jobs whose chunk was counted as a failure before it began
        self._not_before: dict[str, float] = {}  # by job: when to try again

    def plan_next(self) -> int:
        """Plan one chunk of the next job, of the model and the tenant whose turn it is.

        A job that cannot be planned is tried again later, and other jobs continue. After
        NIGHTJAR_PLAN_ATTEMPTS failures in a row its waiting requests fail, with the reason.

        Returns:
            Number of requests planned or ended; 0 if no job can be planned now.

        Raises:
            StoreUnavailableError: The database is away.
        """
        now = self._clock()
        self._not_before = {job: when for job, when in self._not_before.items() if when > now}
        self._give_back()  # where the database was away
        taken = self._take_range()
        if taken is None:
            return 0
        found, rows = taken
        done = self._plan_range(found, rows)
        self._give_back()
        return done

    def beat(self) -> None:
        """Tell other planners that this one lives, and what its plans follow from."""
        self._store.planners.beat(self.owner, self.plans_with)
        self._is_known = True

    def _take_range(self) -> tuple[JobToPlan, PlanningRange] | None:
        """Take rows of the next job; what others plan is left to them."""
        if not self._is_known:
            self.beat()
        besides = set(self._not_before)
        self._others_plan = False
        while (found := self._turns.next_job(besides)) is not None:
            # An interruption by the database is not a failure of the job.
            is_counted = found.id in self._counted
            rows = self._store.planners.take(
                found.id,
                self.owner,
                self._settings.plan_chunk_requests,
                count_failure=not is_counted,
            )
            if rows is not None:
                self._holds_range = True
                if rows.is_lowest:
                    self._counted.add(found.id)
                return replace(found, failures=found.failures - is_counted), rows
            besides.add(found.id)
            self._others_plan = True
        return None

    def _give_back(self) -> None:
        if self._holds_range:
            self._store.planners.release(self.owner)
            self._holds_range = False

    def _plan_range(self, found: JobToPlan, rows: PlanningRange) -> int:
        if rows.is_lowest and found.failures >= self._settings.plan_attempts:
            self._counted.discard(found.id)
            return self._give_up(found)
        try:
            return self._plan(found, rows)
        except StoreUnavailableError:
            raise
        # Also a panic of the tokenizers library, which is no Exception.
        except BaseException as error:  # noqa: BLE001 - noted in SQL, and logged
            self._note_failure(found, error)
            return 1

    def pause_s(self) -> float | None:
        """Seconds until there may be something to plan; None if that is not known.

        A failed job is tried again, or rows that others have taken are looked at again.
        """
        pauses = [when - self._clock() for when in self._not_before.values()]
        pauses += [_LOOK_AGAIN_S] * self._others_plan
        return max(0.0, min(pauses)) if pauses else None

    def _plan(self, found: JobToPlan, rows: PlanningRange) -> int:
        settings = self._settings
        # A smaller chunk after each failure: parts may succeed where the whole is too large.
        smaller = 4 * found.failures if rows.is_lowest else 0
        most = max(1, settings.plan_chunk_requests >> smaller)
        requests = self._store.backlog.queued_requests(
            found.id, most, settings.plan_chunk_bytes, rows
        )
        self._leave_to_others(rows, requests)
        trace = self._store.traces.of_jobs([found.id]).get(found.id) if traces.is_on else None
        with traces.span("plan", trace, {"nightjar.job_id": found.id}):
            done = self._plan_chunk(found, requests) if requests else 0
        self._counted.discard(found.id)
        return done

    def _leave_to_others(self, rows: PlanningRange, requests: list[QueuedRequest]) -> None:
        """Where rows are so long that the chunk is full before the range ends, narrow the range."""
        sizes = [request.size for request in requests]
        is_full = sum(sizes) + max(sizes, default=0) > self._settings.plan_chunk_bytes
        if is_full and requests[-1].index + 1 < rows.end:
            self._store.planners.narrow(self.owner, rows, requests[-1].index + 1)

    def _note_failure(self, found: JobToPlan, error: BaseException) -> None:
        self._counted.discard(found.id)
        # The message of other errors may repeat a request's content.
        told = f": {error}" if isinstance(error, StoreError) else ""
        reason = f"{type(error).__name__}{told}"
        pause_s = min(_LONGEST_BACK_OFF_S, _BACK_OFF_S * 2.0**found.failures)
        self._not_before[found.id] = self._clock() + pause_s
        logger.error(
            "a chunk of %s cannot be planned; it is tried again in %.0f s",
            found.id,
            pause_s,
            exc_info=error,
            extra={"action": "plan_failed", "job_id": found.id},
        )
        self._store.backlog.note_plan_error(found.id, reason)

    def _give_up(self, found: JobToPlan) -> int:
        """Fail some of a job's waiting requests; the next call continues."""
        reason = found.error or _DIED
        message = f"could not be planned in {found.failures} attempts; the last time: {reason}"
        failed = self._store.backlog.fail_unplanned(
            found.id, RequestError("internal_error", message)
        )
        logger.error(
            "%d requests of %s fail: %s",
            failed,
            found.id,
            message,
            extra={"action": "plan_given_up", "job_id": found.id},
        )
        return failed

    def _plan_chunk(self, found: JobToPlan, requests: list[QueuedRequest]) -> int:
        """Plan the requests, or the first of them; return how many."""
        groups, refused = self._models.sort(found.model, requests)
        if refused:
            self._store.planning.save_plan(found.id, [], [], refused)
        done, packed, left = len(refused), 0, self._settings.plan_chunk_tokens
        for model, group in groups:
            planned = self._plan_for(model, found, group, left)
            done, packed = done + planned.requests, packed + planned.packed_tokens
            left -= planned.encoded_tokens
            if left <= 0:
                break
        # A request that is refused or answered costs a little, too.
        self._turns.charge(found, done + packed)
        return done

    def _plan_for(
        self,
        model: PlanningModel,
        found: JobToPlan,
        requests: list[QueuedRequest],
        most_tokens: int,
    ) -> _Planned:
        """Plan requests for a model, or the first of them."""
        encoded, rejected, tokens = self._encode(model.encoder, requests, most_tokens)
        by_id = {request.id: request for request in requests}
        done = len(encoded) + len(rejected)
        answered: list[NewResult] = []
        if model.cache is not None:
            answered = model.cache.find((by_id[item.id], item) for item in encoded)
            known = {item.request_id for item in answered}
            encoded = [item for item in encoded if item.id not in known]
        batches = pack(
            [packable(by_id[item.id], item) for item in encoded],
            most_requests=self._settings.micro_batch_requests,
            most_tokens=self._settings.micro_batch_tokens,
        )
        self._store.planning.save_plan(
            found.id,
            encoded,
            batches,
            rejected,
            answered,
            fingerprint=model.fingerprint,
            live=found.live,
        )
        logger.info(
            "planned %d requests of %s into %d micro-batches, refused %d, had %d answers",
            len(encoded),
            found.id,
            len(batches),
            len(rejected),
            len(answered),
            extra={"action": "plan_chunk", "job_id": found.id},
        )
        return _Planned(done, tokens, sum(batch.tokens for batch in batches))

    def _encode(
        self, encoder: Encoder, requests: list[QueuedRequest], most_tokens: int
    ) -> tuple[list[EncodedRequest], Refused, int]:
        """Encode requests until the tokens are spent; the others wait. Also returns the tokens."""
        encoded: list[EncodedRequest] = []
        rejected: Refused = []
        tokens = 0
        for group in in_groups(requests, attrgetter("size"), _ENCODE_BYTES):
            done, refused = self._encode_group(encoder, group)
            encoded += done
            rejected += refused
            tokens += sum(sum(map(len, item.segments)) for item in done)
            if tokens >= most_tokens:
                break
        return encoded, rejected, tokens

    def _encode_group(
        self, encoder: Encoder, requests: list[QueuedRequest]
    ) -> tuple[list[EncodedRequest], Refused]:
        """Encode together; if that raises, each alone, so that only the faulty request fails."""
        try:
            return encoder.encode(requests)
        except BaseException:  # a panic of the tokenizers library is no Exception
            logger.exception("a chunk cannot be encoded; encoding its requests one by one")
        encoded: list[EncodedRequest] = []
        rejected: Refused = []
        for request in requests:
            try:
                done, refused = encoder.encode([request])
            except BaseException as error:
                logger.exception("request %d cannot be encoded", request.id)
                fault = f"the planner failed: {type(error).__name__}"
                refused = [(request.id, RequestError("internal_error", fault))]
                done = []
            encoded += done
            rejected += refused
        return encoded, rejected


def packable(request: QueuedRequest, encoded: EncodedRequest) -> Packable:
    """Return an encoded request with the sizes that packing needs."""
    generates = request.kind is RequestKind.GENERATE
    return Packable(encoded, request.kind, int(request.body["max_tokens"]) if generates else 0)
