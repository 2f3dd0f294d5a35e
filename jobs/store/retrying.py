"""Retrying by hand: requests that failed through no fault of their own are computed again."""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs import lifecycle
from nightjar.jobs.errors import LifecycleError
from nightjar.jobs.states import JobState, RequestState
from nightjar.jobs.store.awaiting import lower_planned_to
from nightjar.jobs.store.batch_tables import batch
from nightjar.jobs.store.common import FAULT_STATUS, AnyRow, now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.holding import CRASHED_CODE
from nightjar.jobs.store.job_rows import find_job
from nightjar.jobs.store.outcomes import Outcomes
from nightjar.jobs.store.parts import InPartOf, in_parts_of
from nightjar.jobs.store.quotas import Quotas
from nightjar.jobs.store.suspects import isolate
from nightjar.jobs.store.tables import job, micro_batch, request, result
from nightjar.jobs.store.token_ids import drop_token_ids

REQUESTS_PER_STEP = 1_000

_origin = micro_batch.c
_RETRIABLE = (
    result.c.job_id == sa.bindparam("job", type_=sa.Text),
    InPartOf(result.c.request_id, sa.bindparam("job", type_=sa.Text)),
    InPartOf(request.c.id, sa.bindparam("job", type_=sa.Text)),
    result.c.row_index > sa.bindparam("after"),
    result.c.error_code.is_not(None),
    result.c.status_code >= FAULT_STATUS,
    request.c.state == RequestState.FAILED,
)
_FAILURES = (
    sa.select(
        request.c.id,
        request.c.row_index,
        request.c.leader_id,
        request.c.micro_batch_id,
        result.c.error_code,
        result.c.landing,
        _origin.job_id,
        _origin.kind,
        _origin.bucket,
        _origin.size,
        _origin.tokens,
        _origin.fingerprint,
    )
    .select_from(result)
    .join(request, request.c.id == result.c.request_id)
    .outerjoin(micro_batch, _origin.id == request.c.micro_batch_id)
    .where(*_RETRIABLE)
    .order_by(result.c.row_index)
    .with_for_update(of=request)
)
_COUNT = (
    sa.select(sa.func.count())
    .select_from(result)
    .join(request, request.c.id == result.c.request_id)
    .where(*_RETRIABLE)
)
# These jobs go on; one that runs, waits or is paused keeps its state.
_OVER = [JobState.COMPLETED_WITH_FAILURES, JobState.FAILED]


class Retries:
    """Takes failures back."""

    def __init__(self, database: Database, outcomes: Outcomes, quotas: Quotas) -> None:
        self._database = database
        self._outcomes = outcomes
        self._quotas = quotas

    def retry(self, job_id: str) -> int:
        """Queue the job's failed requests again; returns how many there are.

        Failures that are the request's own fault (a status below 500) stay. Requests that had
        crashed are computed alone from the start, and their crashes are counted from 0; the others
        are planned again. If the job was over or its deadline has passed, its completion window
        begins again: else the next sweep would end it.

        Raises:
            UnknownJobError: There is no such job.
            LifecycleError: The job was cancelled, has expired or was purged. Or it is a batch that
                is over: who has seen its result files may rely on them.
            QuotaError: The tenant may not add so many rows now; nothing is retried.
        """
        retried, after = 0, -1
        with self._database.reading() as connection:
            found = find_job(connection, job_id)
            if found.purged_at is not None:
                raise _purged(job_id)
            if found.state not in lifecycle.RETRIABLE:
                state = found.state.value
                raise LifecycleError(f"job {job_id} is {state}: nothing of it can be retried")
            counted = {"job": job_id, "after": after}
            self._quotas.check_retry(
                connection, found.tenant, lambda: connection.scalar(_COUNT, counted) or 0
            )
        while rows := self._database.write(partial(self.take_back, job_id=job_id, after=after)):
            retried += len(rows)
            after = rows[-1].row_index
        return retried

    def take_back(self, connection: Connection, job_id: str, after: int) -> Sequence[AnyRow]:
        """Take back some failures behind the row `after`; gives their rows."""
        some = _FAILURES.limit(REQUESTS_PER_STEP)
        rows = connection.execute(some, {"job": job_id, "after": after}).all()
        if not rows:
            return ()
        ids = [row.id for row in rows]
        connection.execute(
            sa.delete(result).where(
                result.c.request_id.in_(ids), InPartOf(result.c.request_id, job_id)
            )
        )
        led = [row for row in rows if row.leader_id is not None]
        leaders = [row for row in rows if row.leader_id is None]
        crashed = [row for row in leaders if row.error_code == CRASHED_CODE]
        for row in crashed:
            isolate(connection, row, row.micro_batch_id, [row.id])
            drop_token_ids(connection, row.micro_batch_id)
        again = [row for row in leaders if row.error_code != CRASHED_CODE]
        _step(connection, [row.id for row in crashed], RequestState.PLANNED)
        _step(connection, [row.id for row in again], RequestState.QUEUED, micro_batch_id=None)
        _step(connection, [row.id for row in led], RequestState.FOLLOWING)
        _reopen(connection, job_id, rows)
        if again:
            lower_planned_to(connection, job_id, again[0].row_index)
        # The leader may have ended again since an earlier step.
        self._outcomes.land_followers(connection, job_id, {row.leader_id for row in led})
        return rows


def _reopen(connection: Connection, job_id: str, rows: Sequence[AnyRow]) -> None:
    """Subtract failures from the job's counters, and let it go on if it was over."""
    emptied = sum(row.landing is not None for row in rows)
    row = connection.execute(
        sa.select(
            job.c.state,
            job.c.created_at,
            job.c.expires_at,
            job.c.completion_window_s,
            job.c.purged_at,
        )
        .where(job.c.id == job_id)
        .with_for_update()
    ).one()
    if row.purged_at is not None:
        raise _purged(job_id)
    is_batch = sa.select(batch.c.job_id).where(batch.c.job_id == job_id)
    if row.state in _OVER and connection.scalar(is_batch) is not None:
        raise LifecycleError(
            f"job {job_id} is a batch that is over, and its result files stay as they are; make a "
            "new batch of the rows that failed"
        )
    begun = sa.case((job.c.started_at.is_(None), JobState.QUEUED), else_=JobState.RUNNING)
    reopened = sa.update(job).where(job.c.id == job_id, job.c.state.in_(lifecycle.RETRIABLE))
    values = {
        "failed": job.c.failed - len(rows),
        "taken_back": job.c.taken_back + emptied,
        "state": sa.case((job.c.state.in_(_OVER), begun), else_=job.c.state),
        "finished_at": None,
        "purge_at": None,
        "exported_at": None,
        **_new_deadline(row),
        "plan_failures": 0,
    }
    if connection.execute(reopened.values(values)).rowcount == 0:
        raise LifecycleError(f"job {job_id} was stopped: nothing of it can be retried")


def _purged(job_id: str) -> LifecycleError:
    return LifecycleError(
        f"job {job_id} was purged: its requests are gone, and nothing of it can be retried; submit "
        "it again"
    )


def _new_deadline(row: AnyRow) -> dict[str, object]:
    """The next deadline of a job that was over or whose deadline has passed; else nothing."""
    moment = now()
    if row.expires_at is None or (row.state not in _OVER and row.expires_at > moment):
        return {}
    window_s = row.completion_window_s
    if window_s is None:  # a job of the version before
        window_s = (row.expires_at - row.created_at).total_seconds()
    expires_at = moment + timedelta(seconds=window_s)
    return {"expires_at": expires_at, "completion_window_s": window_s}


def _step(
    connection: Connection, ids: Sequence[int], target: RequestState, **values: object
) -> None:
    lifecycle.check_step(lifecycle.REQUEST_TRANSITIONS, RequestState.FAILED, target)
    connection.execute(
        sa.update(request)
        .where(request.c.id.in_(ids), in_parts_of(request.c.id, ids))
        .values(state=target, **values)
    )
