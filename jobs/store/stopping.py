"""Stopping a job: a cancel or its deadline ends it, a pause holds it.

Results that have landed stay. Of a job that ends, requests that have not begun end at once; leased
ones still land their results.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs import lifecycle
from nightjar.jobs.errors import UnknownJobError
from nightjar.jobs.records import Job
from nightjar.jobs.states import BatchStage, JobState, MicroBatchState, StopReason
from nightjar.jobs.store.awaiting import LOCK_WAITING, planned_to, raise_planned_to
from nightjar.jobs.store.batch_tables import batch
from nightjar.jobs.store.common import OPEN_JOBS, now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.job_rows import find_job
from nightjar.jobs.store.membership import open_members
from nightjar.jobs.store.outcomes import Outcomes
from nightjar.jobs.store.stop_reasons import find_stop, stopped_result
from nightjar.jobs.store.tables import job, micro_batch
from nightjar.jobs.store.token_ids import drop_token_ids
from nightjar.jobs.store.turns import Turns

# A job of millions is cancelled in pieces, so that nobody waits long for the write lock. One
# transaction ends so many requests, and up to FOLLOWERS_PER_STEP that follow them.
REQUESTS_PER_STEP = 2_000
MICRO_BATCHES_PER_STEP = 100
# A cancel works so long on requests that have not begun; the sweeper ends the rest.
CANCEL_PATIENCE_S = 1.0


class Stopping:
    """Cancels, expires, pauses and resumes jobs."""

    def __init__(self, database: Database, outcomes: Outcomes) -> None:
        self._database = database
        self._outcomes = outcomes

    def cancel(self, job_id: str) -> Job:
        """Cancel a job; a job that is over stays as it is.

        Queued requests and micro-batches that nobody computes end now, with the error
        `cancelled`; of a big job, the sweeper ends most of them. A leased micro-batch ends when its
        worker finishes it or gives it back. Until then the job is `cancelling`. Raises
        UnknownJobError.
        """
        found = self.request_cancel(job_id)
        if found.state != JobState.CANCELLING:
            return found
        self._cancel_what_waits([job_id], CANCEL_PATIENCE_S)
        with self._database.reading() as connection:
            return find_job(connection, job_id)

    def request_cancel(self, job_id: str) -> Job:
        """Only note that the job is to be cancelled; `finish` ends its waiting requests."""
        flag = (
            sa.update(job)
            .where(job.c.id == job_id, job.c.state.in_(OPEN_JOBS))
            .values(state=JobState.CANCELLING, cancel_requested=True, takes_rows=False)
        )
        of_batch = (
            sa.update(batch)
            .where(batch.c.job_id == job_id, batch.c.cancelling_at.is_(None))
            .values(cancelling_at=now())
        )

        def work(connection: Connection) -> None:
            if connection.execute(flag).rowcount:
                connection.execute(of_batch)

        self._database.write(work)
        with self._database.reading() as connection:
            return find_job(connection, job_id)

    def request_cancel_if_there(self, job_id: str) -> None:
        """The same for a job or batch of which there may be no rows yet, or no more."""
        unread = (
            sa.update(batch)
            .where(batch.c.job_id == job_id, batch.c.stage == BatchStage.VALIDATING)
            .where(batch.c.cancelling_at.is_(None))
            .values(cancelling_at=now())
        )
        self._database.write(lambda connection: connection.execute(unread))
        with suppress(UnknownJobError):
            self.request_cancel(job_id)

    def expire(self) -> list[str]:
        """Stop the jobs whose deadline has passed on the caller's wall clock; returns their ids.

        Their waiting requests end in `finish`, with the error `expired`.
        """
        overdue = (job.c.state.in_(OPEN_JOBS), job.c.expires_at <= now())
        with self._database.reading() as connection:  # most calls find none, and need no lock
            ids = list(connection.scalars(sa.select(job.c.id).where(*overdue)))
        if not ids:
            return []
        flag = (
            sa.update(job)
            .where(job.c.id.in_(ids), *overdue)
            .values(
                state=JobState.CANCELLING, cancel_requested=True, expired=True, takes_rows=False
            )
            .returning(job.c.id)
        )
        return self._database.write(lambda connection: list(connection.scalars(flag)))

    def pause(self, job_id: str) -> Job:
        """Begin nothing more of a job until it is resumed; a job that is over stays as it is.

        Leased micro-batches finish, and the deadline holds. Raises UnknownJobError.
        """
        sources = lifecycle.states_before(lifecycle.JOB_TRANSITIONS, JobState.PAUSED)
        return self._move(job_id, sources, JobState.PAUSED)

    def resume(self, job_id: str) -> Job:
        """Go on with a paused job; any other stays as it is. Raises UnknownJobError."""
        begun = sa.case((job.c.started_at.is_(None), JobState.QUEUED), else_=JobState.RUNNING)
        return self._move(job_id, [JobState.PAUSED], begun)

    def _move(
        self, job_id: str, sources: Sequence[JobState], target: JobState | sa.Case[Any]
    ) -> Job:
        moved = (
            sa.update(job).where(job.c.id == job_id, job.c.state.in_(sources)).values(state=target)
        )
        self._database.write(lambda connection: connection.execute(moved))
        with self._database.reading() as connection:
            return find_job(connection, job_id)

    def finish(self, patience_s: float = math.inf) -> int:
        """End the waiting requests of jobs that are being stopped; returns how many.

        No step begins after `patience_s` seconds; the next call goes on with the rest.

        For the sweeper: jobs expire without a caller, a process that cancels may die half-way, and
        a planner may store a plan while the job is being stopped.
        """
        return self._cancel_what_waits(self.being_stopped(), patience_s)

    def being_stopped(self) -> list[str]:
        """The jobs that were cancelled or have expired, and are not over."""
        statement = sa.select(job.c.id).where(job.c.state == JobState.CANCELLING)
        with self._database.reading() as connection:
            return list(connection.scalars(statement))

    def _cancel_what_waits(self, job_ids: Sequence[str], patience_s: float) -> int:
        """End some requests of each job in turn, so that a big job does not delay the others."""
        deadline = time.monotonic() + patience_s
        turns = Turns(self._database)
        waiting, ended = list(job_ids), 0
        while waiting:
            for job_id in tuple(waiting):
                if ended and time.monotonic() >= deadline:
                    return ended
                turns.give()
                count = self._cancel_some(job_id)
                ended += count
                if not count:
                    waiting.remove(job_id)
        return ended

    def _cancel_some(self, job_id: str) -> int:
        # Followers that do not fit into their leaders' transaction come last.
        for step in (self._cancel_micro_batches, self._cancel_queued, self._outcomes.land_some):
            if count := self._database.write(partial(step, job_id=job_id)):
                return count
        # An open job may have had no row that waited.
        self._database.write(lambda connection: self._outcomes.end_if_over(connection, job_id))
        return 0

    def _cancel_micro_batches(self, connection: Connection, job_id: str) -> int:
        """Cancel some micro-batches that nobody has claimed; returns how many requests ended."""
        waiting = [MicroBatchState.READY, MicroBatchState.DISPATCHED]
        found = connection.execute(
            sa.select(micro_batch.c.id, micro_batch.c.size)
            .where(micro_batch.c.job_id == job_id, micro_batch.c.state.in_(waiting))
            .order_by(micro_batch.c.id)
            .limit(MICRO_BATCHES_PER_STEP)
            .with_for_update()
        ).all()
        if not found:
            return 0
        sizes = accumulate(row.size for row in found)
        fitting = sum(size <= REQUESTS_PER_STEP for size in sizes)
        ids = [row.id for row in found[: max(1, fitting)]]
        indexes = open_members(connection, ids)
        connection.execute(
            sa.update(micro_batch)
            .where(micro_batch.c.id.in_(ids))
            .values(state=MicroBatchState.CANCELLED, ended_at=now())
        )
        drop_token_ids(connection, *ids)
        return self._end_as_stopped(connection, job_id, indexes)

    def _cancel_queued(self, connection: Connection, job_id: str) -> int:
        """Cancel some requests that are in no micro-batch; returns how many."""
        first = planned_to(connection, job_id)
        some = {"of_job": job_id, "first": first, "last": first + REQUESTS_PER_STEP - 1}
        indexes = dict(connection.execute(LOCK_WAITING, some).all())
        count = self._end_as_stopped(connection, job_id, indexes)
        if count:
            raise_planned_to(connection, job_id)
        return count

    def _end_as_stopped(
        self, connection: Connection, job_id: str, indexes: Mapping[int, int]
    ) -> int:
        if indexes:
            reason = find_stop(connection, job_id) or StopReason.CANCELLED
            self._outcomes.land(
                connection, job_id, [stopped_result(id_, reason) for id_ in indexes], indexes
            )
        return len(indexes)
