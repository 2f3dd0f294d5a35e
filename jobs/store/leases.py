"""Leases: a worker claims a micro-batch, computes it and finishes it, once.

A lease is fenced by owner and epoch. Whoever takes a lease back raises the
epoch; work that is finished under an older one is thrown away.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from nightjar.jobs import lifecycle
from nightjar.jobs.errors import StoreError
from nightjar.jobs.records import (
    ClaimedMicroBatch,
    ClaimedRequest,
    ComputeSeconds,
    JobState,
    MicroBatchRef,
    MicroBatchState,
    NewResult,
    RequestError,
    RequestState,
    WorkerHeartbeat,
)
from nightjar.jobs.store.base import REF_COLUMNS, StorePart, cancelled_result, now
from nightjar.jobs.store.bodies import load_body
from nightjar.jobs.store.segments import unpack_segments
from nightjar.jobs.store.tables import job, micro_batch, request, worker

CRASHED_STATUS = 500
_SECONDS = ComputeSeconds.__slots__

# The statements of every micro-batch are built once: building costs more than running them.
_mb = micro_batch.c
_CLAIM = (
    sa.update(micro_batch)
    .where(
        _mb.id == sa.bindparam("claimed"),
        _mb.epoch == sa.bindparam("at_epoch"),
        _mb.state.in_([MicroBatchState.READY, MicroBatchState.DISPATCHED]),
    )
    .values(state=MicroBatchState.LEASED, owner=sa.bindparam("by"), attempts=_mb.attempts + 1)
    .returning(*_mb)
)
_OWNING_JOB = sa.select(job.c.model, job.c.cancel_requested, job.c.state).where(
    job.c.id == sa.bindparam("job")
)
_HOLD = (
    sa.select(*_mb)
    .where(
        _mb.id == sa.bindparam("held"),
        _mb.epoch == sa.bindparam("at_epoch"),
        _mb.owner == sa.bindparam("by"),
        _mb.state == MicroBatchState.LEASED,
    )
    .with_for_update()
)
_members = sa.and_(
    request.c.micro_batch_id == sa.bindparam("micro_batch"),
    request.c.state == RequestState.PLANNED,
)
_UNFINISHED = sa.select(request.c.id, request.c.row_index).where(_members).order_by(request.c.id)
_CLAIMED_REQUESTS = (
    sa.select(
        request.c.id,
        request.c.row_index,
        request.c.custom_id,
        request.c.kind,
        request.c.body,
        request.c.segments,
        request.c.prompt_vector,
    )
    .where(_members)
    .order_by(request.c.id)
)
_CLOSE = (
    sa.update(micro_batch)
    .where(_mb.id == sa.bindparam("closed"))
    .values(state=sa.bindparam("outcome"), owner=None)
)
_CANCELLED = sa.select(job.c.cancel_requested).where(job.c.id == sa.bindparam("job"))


class LeaseStore(StorePart):
    """What workers and the sweeper ask for."""

    def claim(self, micro_batch_id: int, epoch: int, owner: str) -> ClaimedMicroBatch | None:
        """Lease a micro-batch to `owner`; committed before the caller computes anything.

        None if the message is stale or a duplicate (acknowledge it and go on), or
        if the job was cancelled: then its requests end as cancelled. The first
        claim of a job sets it running.
        """

        def work(connection: Connection) -> ClaimedMicroBatch | None:
            key = {"claimed": micro_batch_id, "at_epoch": epoch, "by": owner}
            leased = connection.execute(_CLAIM, key).one_or_none()
            if leased is None:
                return None
            owning = connection.execute(_OWNING_JOB, {"job": leased.job_id}).one()
            if owning.cancel_requested:
                self._end(connection, leased, (), MicroBatchState.CANCELLED)
                return None
            if owning.state == JobState.QUEUED:
                _set_running(connection, leased.job_id)
            return _claimed(connection, leased, owning.model)

        # Not durable: a claim that a power cut undoes leaves results that `finish` throws away.
        return self._database.write(work, durable=False)

    def finish(
        self, micro_batch_id: int, epoch: int, owner: str, results: Sequence[NewResult]
    ) -> bool:
        """Land the outcomes of a leased micro-batch, in one transaction.

        False if the lease is no longer this owner's: the results are thrown away.
        Every request needs its result; those of a cancelled job may lack it and
        then end as cancelled. Raises StoreError for a missing or a foreign result,
        and nothing lands.
        """

        def work(connection: Connection) -> bool:
            leased = _hold(connection, micro_batch_id, epoch, owner)
            if leased is None:
                return False
            self._end(connection, leased, results, MicroBatchState.DONE)
            return True

        return self._database.write(work)

    def fail_micro_batch(
        self, micro_batch_id: int, epoch: int, owner: str, error: RequestError
    ) -> bool:
        """End a leased micro-batch with the same error for each request that has no outcome."""

        def work(connection: Connection) -> bool:
            leased = _hold(connection, micro_batch_id, epoch, owner)
            if leased is None:
                return False
            results = [
                NewResult(id_, CRASHED_STATUS, None, error)
                for id_ in _unfinished(connection, micro_batch_id)
            ]
            self._end(connection, leased, results, MicroBatchState.DONE)
            return True

        return self._database.write(work)

    def give_back(
        self, micro_batch_id: int, epoch: int, owner: str, *, crashed: bool = False
    ) -> bool:
        """Return a lease unfinished: the epoch rises and the micro-batch is ready again.

        `crashed` counts a crash of the compute process against it. A cancelled
        job's micro-batch ends as cancelled instead. False if the lease was not
        this owner's any more.
        """

        def work(connection: Connection) -> bool:
            leased = _hold(connection, micro_batch_id, epoch, owner)
            if leased is None:
                return False
            self._release(connection, leased, crashed=crashed)
            return True

        return self._database.write(work)

    def leased(self, owner: str) -> list[MicroBatchRef]:
        """The micro-batches that this owner holds."""
        statement = sa.select(*REF_COLUMNS).where(
            _mb.state == MicroBatchState.LEASED, _mb.owner == owner
        )
        with self._database.reading() as connection:
            return [MicroBatchRef(*row) for row in connection.execute(statement)]

    def release_owner(self, owner: str) -> int:
        """Take every lease of a dead worker back; returns how many there were."""
        statement = (
            sa.select(*_mb)
            .where(_mb.state == MicroBatchState.LEASED, _mb.owner == owner)
            .order_by(_mb.id)
            .with_for_update()
        )

        def work(connection: Connection) -> int:
            held = connection.execute(statement).all()
            for leased in held:
                self._release(connection, leased, crashed=False)
            return len(held)

        return self._database.write(work)

    def beat(self, owner: str, seconds: ComputeSeconds) -> None:
        """Raise the worker's counter: it lives. Every 2 s, from the worker's own thread.

        `seconds` is what its compute processes have spent since the worker started.
        """
        fresh = self._database.insert(worker).values(
            owner=owner,
            counter=1,
            seen_at=now(),
            engine_s=seconds.engine_s,
            load_s=seconds.load_s,
        )
        written = {name: fresh.excluded[name] for name in ("seen_at", *_SECONDS)}
        statement = fresh.on_conflict_do_update(
            index_elements=[worker.c.owner], set_={"counter": worker.c.counter + 1, **written}
        )
        self._database.write(lambda connection: connection.execute(statement))

    def compute_seconds(self) -> ComputeSeconds:
        """What all workers, ended ones too, have said in their last beats, summed."""
        sums = [sa.func.coalesce(sa.func.sum(worker.c[name]), 0.0) for name in _SECONDS]
        with self._database.reading() as connection:
            return ComputeSeconds(*connection.execute(sa.select(*sums)).one())

    def heartbeats(self) -> list[WorkerHeartbeat]:
        """The counters of the workers that hold leases; 0 for one that never beat."""
        statement = (
            sa.select(_mb.owner, sa.func.coalesce(worker.c.counter, 0))
            .select_from(micro_batch)
            .outerjoin(worker, worker.c.owner == _mb.owner)
            .where(_mb.state == MicroBatchState.LEASED)
            .distinct()
        )
        with self._database.reading() as connection:
            return [WorkerHeartbeat(owner, count) for owner, count in connection.execute(statement)]

    def _release(self, connection: Connection, leased: Row[Any], *, crashed: bool) -> None:
        if _is_cancelled(connection, leased.job_id):
            self._end(connection, leased, (), MicroBatchState.CANCELLED)
            return
        connection.execute(
            sa.update(micro_batch)
            .where(_mb.id == leased.id)
            .values(
                state=MicroBatchState.READY,
                epoch=_mb.epoch + 1,
                owner=None,
                crashes=_mb.crashes + int(crashed),
            )
        )

    def _end(
        self,
        connection: Connection,
        held: Row[Any],
        results: Sequence[NewResult],
        state: MicroBatchState,
    ) -> None:
        """Close a micro-batch that this transaction holds, with an outcome for each request."""
        indexes = _unfinished(connection, held.id)
        given = {item.request_id for item in results}
        missing = indexes.keys() - given
        if foreign := given - indexes.keys():
            raise StoreError(f"micro-batch {held.id} has no open requests {sorted(foreign)[:5]}")
        if missing and not _is_cancelled(connection, held.job_id):
            raise StoreError(f"micro-batch {held.id} lacks results for {sorted(missing)[:5]}")
        lifecycle.check_step(lifecycle.MICRO_BATCH_TRANSITIONS, MicroBatchState.LEASED, state)
        connection.execute(_CLOSE, {"closed": held.id, "outcome": state})
        cancelled = [cancelled_result(id_) for id_ in sorted(missing)]
        self._land(connection, held.job_id, [*results, *cancelled], indexes)


def _hold(connection: Connection, micro_batch_id: int, epoch: int, owner: str) -> Row[Any] | None:
    """The micro-batch, locked, if this owner still holds its lease at this epoch."""
    key = {"held": micro_batch_id, "at_epoch": epoch, "by": owner}
    return connection.execute(_HOLD, key).one_or_none()


def _unfinished(connection: Connection, micro_batch_id: int) -> dict[int, int]:
    """Row index of each request of the micro-batch that has no outcome yet, by request id."""
    rows = connection.execute(_UNFINISHED, {"micro_batch": micro_batch_id})
    return dict(rows.all())


def _is_cancelled(connection: Connection, job_id: str) -> bool:
    return bool(connection.scalar(_CANCELLED, {"job": job_id}))


def _set_running(connection: Connection, job_id: str) -> None:
    sources = lifecycle.states_before(lifecycle.JOB_TRANSITIONS, JobState.RUNNING)
    connection.execute(
        sa.update(job)
        .where(job.c.id == job_id, job.c.state.in_(sources))
        .values(state=JobState.RUNNING, started_at=now())
    )


def _claimed(connection: Connection, leased: Row[Any], model: str) -> ClaimedMicroBatch:
    requests = [
        ClaimedRequest(
            id_, index, custom_id, kind, load_body(body), unpack_segments(segments), vectors
        )
        for id_, index, custom_id, kind, body, segments, vectors in connection.execute(
            _CLAIMED_REQUESTS, {"micro_batch": leased.id}
        ).all()
    ]
    return ClaimedMicroBatch(
        id=leased.id,
        epoch=leased.epoch,
        job_id=leased.job_id,
        kind=leased.kind,
        bucket=leased.bucket,
        size=leased.size,
        tokens=leased.tokens,
        model=model,
        attempts=leased.attempts,
        crashes=leased.crashes,
        requests=requests,
    )
