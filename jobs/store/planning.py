"""Planning and dispatching: requests become micro-batches, micro-batches become messages."""

from collections.abc import Collection, Sequence
from itertools import compress
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs import lifecycle
from nightjar.jobs.errors import StoreError
from nightjar.jobs.records import (
    EncodedRequest,
    MicroBatchRef,
    NewMicroBatch,
    NewResult,
    RequestError,
)
from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.store.awaiting import raise_planned_to
from nightjar.jobs.store.bulk import BulkInsert, BulkUpdate
from nightjar.jobs.store.common import (
    FAULT_STATUS,
    REF_COLUMNS,
    set_running,
)
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.fair_order import in_fair_order
from nightjar.jobs.store.outcomes import Outcomes
from nightjar.jobs.store.plans import (
    MEMBERSHIP,
    insert_micro_batches,
    lock_queued,
    members,
)
from nightjar.jobs.store.precedence import several_tenants
from nightjar.jobs.store.ready import in_rank_order, models_with_ready
from nightjar.jobs.store.tables import (
    READY_LIVE,
    job,
    micro_batch,
    micro_batch_tokens,
    planning_range,
    request,
)
from nightjar.jobs.store.token_ids import pack_asked, pack_token_ids
from nightjar.jobs.store.vectors import keep_versions

REJECTED_STATUS = 400
_mb = micro_batch.c
# Built once, as each tick and each plan uses them: building costs more than running.
_IN_FLIGHT = (
    sa.select(_mb.fingerprint, _mb.state, sa.func.count())
    # Single calls take no room from jobs.
    .where(_mb.state.in_([MicroBatchState.DISPATCHED, MicroBatchState.LEASED]), ~_mb.live)
    .group_by(_mb.fingerprint, _mb.state)
)
# A failure is of the lowest rows that wait: what is planned behind them does not end it.
_PLANNED = (
    sa.update(job)
    .where(
        job.c.id == sa.bindparam("of_job"),
        job.c.plan_failures > 0,
        ~sa.exists().where(
            planning_range.c.job_id == sa.bindparam("of_job"),
            planning_range.c.end <= sa.bindparam("lowest"),
        ),
    )
    .values(plan_failures=0, plan_error=None)
)
_REFS = sa.select(*REF_COLUMNS).order_by(_mb.job_id, _mb.id)
# In one pass at most; the API bounds how many calls wait.
LIVE_AT_ONCE = 100
_of_call = (
    sa.select(*REF_COLUMNS)
    .where(_mb.fingerprint == sa.bindparam("of_model"), READY_LIVE)
    .subquery()
)
_CALLS = (
    sa.select(*_of_call.c)
    .join(job, job.c.id == _of_call.c.job_id)
    .where(job.c.state.in_(lifecycle.RUNNABLE), ~_of_call.c.isolated)
    .order_by(_of_call.c.id)
    .limit(LIVE_AT_ONCE)
)
_DISPATCHED = _REFS.where(_mb.state == MicroBatchState.DISPATCHED)


class Planning:
    """Stores plans, and says which micro-batches are to be dispatched."""

    def __init__(self, database: Database, outcomes: Outcomes) -> None:
        self._database = database
        self._outcomes = outcomes
        self._join_requests = BulkUpdate(database, request, MEMBERSHIP)
        columns = [column.name for column in micro_batch_tokens.c]
        self._insert_tokens = BulkInsert(database, micro_batch_tokens, columns)

    def save_plan(
        self,
        job_id: str,
        encoded: Sequence[EncodedRequest],
        micro_batches: Sequence[NewMicroBatch],
        rejected: Sequence[tuple[int, RequestError]] = (),
        answered: Sequence[NewResult] = (),
        *,
        fingerprint: str = "",
        live: bool = False,
    ) -> list[MicroBatchRef]:
        """Store micro-batches with their requests' token ids, in one transaction.

        `rejected` become failures; `answered` become results without being computed. `fingerprint`
        is of the model that the requests were encoded for; only its workers may claim them. `live`
        says that the job is a single call. The job keeps the versions of its
        prompt vectors.

        A request may not be queued any more: another planner was faster, or the job was stopped.
        Then the micro-batch that it would have joined is not stored, and its other requests stay
        queued. Returns the micro-batches that were stored; raises StoreError for a plan that does
        not add up.
        """
        wanted = [id_ for item in micro_batches for id_ in item.request_ids]
        missing = set(wanted) - {item.id for item in encoded}
        if (
            missing
            or len(set(wanted)) != len(wanted)
            or not all(item.request_ids for item in micro_batches)
        ):
            raise StoreError(
                "every micro-batch needs requests, each of them encoded and in one micro-batch only"
            )
        by_id = {item.id: item for item in encoded}
        packed = [_packed([by_id[id_] for id_ in item.request_ids]) for item in micro_batches]
        failures = [NewResult(id_, _status(error), None, error) for id_, error in rejected]
        known = [*failures, *answered]
        ids = [*wanted, *(item.request_id for item in known)]
        if not ids:
            return []

        def work(connection: Connection) -> list[MicroBatchRef]:
            indexes = lock_queued(connection, job_id, ids)
            keep_versions(self._database, connection, job_id, encoded)
            fit = [indexes.keys() >= set(item.request_ids) for item in micro_batches]
            stored = list(compress(micro_batches, fit))
            refs = insert_micro_batches(connection, job_id, stored, fingerprint, live=live)
            kept = zip(refs, compress(packed, fit), strict=True)
            self._insert_tokens.run(connection, [(ref.id, *values) for ref, values in kept])
            self._join_requests.run(connection, members(refs, stored, by_id))
            if answered:
                set_running(connection, job_id)
            landing = [item for item in known if item.request_id in indexes]
            self._outcomes.land(connection, job_id, landing, indexes)
            if indexes:
                key = {"of_job": job_id, "lowest": min(indexes.values())}
                connection.execute(_PLANNED, key)
                raise_planned_to(connection, job_id)
            return refs

        return self._outcomes.write(work)

    def dispatchable(self, window: int, per_lease: int = 0) -> list[MicroBatchRef]:
        """Ready micro-batches in the order of their dispatch; no more than there is room.

        With one tenant, that of the job of the first rank first (`in_rank_order`). With several,
        they share each model by their weights (`in_fair_order`).

        `window` bounds the micro-batches of each model that are dispatched or leased at once, so
        that a model without workers keeps no other from being dispatched. If it is more,
        `per_lease` times those that are leased: workers that hold many leases need many messages.
        Single calls come first, and the window does not count them.
        """
        with self._database.reading() as connection:
            counts: dict[tuple[str, MicroBatchState], int] = {
                (fingerprint, state): count
                for fingerprint, state, count in connection.execute(_IN_FLIGHT)
            }
            found: list[MicroBatchRef] = []
            in_order = in_fair_order if several_tenants(connection) else in_rank_order
            for fingerprint in models_with_ready(connection):
                leased = counts.get((fingerprint, MicroBatchState.LEASED), 0)
                in_flight = leased + counts.get((fingerprint, MicroBatchState.DISPATCHED), 0)
                room = max(window, per_lease * leased) - in_flight
                found += _refs(connection, _CALLS, of_model=fingerprint)
                if room > 0:
                    found += in_order(connection, fingerprint, room)
            return found

    def dispatched(self) -> list[MicroBatchRef]:
        """Micro-batches whose message was published and that nobody has claimed yet."""
        with self._database.reading() as connection:
            return _refs(connection, _DISPATCHED)

    def mark_dispatched(self, refs: Collection[MicroBatchRef]) -> None:
        """Note that the messages were published; a micro-batch that was claimed stays claimed."""
        self._step(refs, MicroBatchState.READY, MicroBatchState.DISPATCHED)

    def requeue(self, refs: Collection[MicroBatchRef]) -> None:
        """Make dispatched micro-batches ready again, as their messages were lost."""
        self._step(refs, MicroBatchState.DISPATCHED, MicroBatchState.READY)

    def _step(
        self, refs: Collection[MicroBatchRef], source: MicroBatchState, target: MicroBatchState
    ) -> None:
        if not refs:
            return
        lifecycle.check_step(lifecycle.MICRO_BATCH_TRANSITIONS, source, target)
        row = micro_batch.c
        statement = (
            sa.update(micro_batch)
            .where(
                row.id == sa.bindparam("ref_id"),
                row.epoch == sa.bindparam("ref_epoch"),
                row.state == source,
            )
            .values(state=target)
        )
        # In the order of ids, so that two dispatchers lock the rows alike.
        keys = [{"ref_id": ref.id, "ref_epoch": ref.epoch} for ref in sorted(refs, key=_by_id)]
        # Not durable: if it is undone, a message is sent twice, and one claim finds nothing.
        self._database.write(lambda connection: connection.execute(statement, keys), durable=False)


def _packed(requests: Sequence[EncodedRequest]) -> tuple[bytes, bytes | None]:
    return pack_token_ids({one.id: one.segments for one in requests}), pack_asked(requests)


def _status(error: RequestError) -> int:
    """The status of a request that the planner refused; a fault of the planner is no 400."""
    return FAULT_STATUS if error.code == "internal_error" else REJECTED_STATUS


def _by_id(ref: MicroBatchRef) -> int:
    return ref.id


def _refs(
    connection: Connection, statement: sa.Select[Any], **values: object
) -> list[MicroBatchRef]:
    return [MicroBatchRef(*row) for row in connection.execute(statement, values)]
