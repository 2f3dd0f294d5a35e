"""Why a job is to stop, and the outcome that its requests then get."""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.records import NewResult
from nightjar.jobs.states import StopReason
from nightjar.jobs.store.common import AnyRow
from nightjar.jobs.store.tables import job

_STOPPED = {
    StopReason.CANCELLED: (499, "the job was cancelled before this row was computed"),
    StopReason.EXPIRED: (504, "the job's completion window ended before this row was computed"),
}
STOPPED_CODES = frozenset(reason.value for reason in StopReason)
# Built once: each micro-batch that ends may ask for it.
_STOP = sa.select(job.c.cancel_requested, job.c.expired).where(job.c.id == sa.bindparam("job"))


def stop_reason(row: AnyRow) -> StopReason | None:
    """Why the job of a row (cancel_requested, expired) is to stop; None if it is not."""
    if not row.cancel_requested:
        return None
    return StopReason.EXPIRED if row.expired else StopReason.CANCELLED


def find_stop(connection: Connection, job_id: str) -> StopReason | None:
    """Why the job is to stop; None if it is not."""
    return stop_reason(connection.execute(_STOP, {"job": job_id}).one())


def stopped_result(request_id: int, reason: StopReason) -> NewResult:
    """The outcome of a request whose job was stopped before it was computed."""
    status, message = _STOPPED[reason]
    return NewResult.failure(request_id, reason.value, message, status=status)
