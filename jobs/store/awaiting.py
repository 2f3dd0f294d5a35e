"""Which rows wait to be planned: the queued ones of a job, from its `planned_to` on.

`planned_to` is the first row that is queued, or behind the last row. So whether a job has rows to
plan is one look-up by key. No index is written for it, and no look reads what is over: a long
transaction makes PostgreSQL keep millions of dead versions of that.

Whoever ends or plans queued rows raises it, and whoever queues rows again lowers it, in the same
transaction. A process of the version before does neither: the sweeper mends what it has left
(`PlannedTo.correct`).
"""

from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.states import JobState, MicroBatchState, RequestState
from nightjar.jobs.store.common import OPEN_JOBS, has_rows
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.parts import InPartOf
from nightjar.jobs.store.tables import job, micro_batch, request

UNDER_WAY = (MicroBatchState.READY, MicroBatchState.DISPATCHED, MicroBatchState.LEASED)
_FIRST_WINDOW = 4_096
_LARGEST_WINDOW = 65_536
_row = request.c
_is_queued = _row.state == RequestState.QUEUED
_given = sa.bindparam("of_job", type_=sa.Text)

# A range that is open at one end, and a state that few rows have, may look to PostgreSQL as if
# reading the whole table were best. So each range has two ends.
WAITING_ROWS: tuple[sa.ColumnElement[bool], ...] = (
    _row.job_id == _given,
    InPartOf(_row.id, _given),
    _row.row_index.between(sa.bindparam("first"), sa.bindparam("last")),
    _is_queued,
)
"""Conditions on requests, with the parameters `of_job`, `first` and `last`, which is included."""

HAS_UNPLANNED: sa.ColumnElement[bool] = has_rows(
    _row.row_index,
    _row.job_id == job.c.id,
    InPartOf(_row.id, job.c.id),
    _row.row_index == job.c.planned_to,
    _is_queued,
)
"""A condition on jobs: some of its rows wait to be planned."""

GIVEN_HAS_UNPLANNED: sa.ColumnElement[bool] = has_rows(
    _row.row_index,
    _row.job_id == _given,
    InPartOf(_row.id, _given),
    _row.row_index == sa.select(job.c.planned_to).where(job.c.id == _given).scalar_subquery(),
    _is_queued,
)
"""The same of the job whose id is the parameter `of_job`."""

LOCK_WAITING = (
    sa.select(_row.id, _row.row_index)
    .where(*WAITING_ROWS)
    .order_by(_row.row_index)
    .with_for_update()
)
"""Locks the rows that meet WAITING_ROWS, and gives their ids and indexes."""

_STANDING = sa.select(job.c.total, job.c.planned_to).where(job.c.id == _given)
_LOCK = _STANDING.with_for_update(key_share=True)
_FIRST = sa.select(_row.row_index).where(*WAITING_ROWS).order_by(_row.row_index).limit(1)
_SET = sa.update(job).where(job.c.id == _given).values(planned_to=sa.bindparam("to"))
_LOWER = _SET.where(job.c.planned_to > sa.bindparam("to"))
_open = (
    job.c.state.in_([*OPEN_JOBS, JobState.CANCELLING]),
    job.c.completed + job.c.failed + job.c.cancelled < job.c.total,
    ~HAS_UNPLANNED,
)
_TOO_LOW = sa.select(job.c.id).where(*_open, job.c.planned_to < job.c.total)
# Nothing of these jobs is under way, although some of their rows have no outcome.
_TOO_HIGH = sa.select(job.c.id).where(
    *_open,
    job.c.planned_to == job.c.total,
    *(
        ~has_rows(micro_batch.c.id, micro_batch.c.job_id == job.c.id, micro_batch.c.state == state)
        for state in UNDER_WAY
    ),
)


def planned_to(connection: Connection, job_id: str) -> int:
    """The first row that waits, or the number of rows; 0 of a job that is not there."""
    standing = connection.execute(_STANDING, {"of_job": job_id}).one_or_none()
    return 0 if standing is None else standing.planned_to


def first_waiting(connection: Connection, job_id: str, at: int = 0) -> int | None:
    """The first row from `at` on that waits, or None."""
    standing = connection.execute(_STANDING, {"of_job": job_id}).one_or_none()
    if standing is None:
        return None
    return _first(connection, job_id, max(at, standing.planned_to), standing.total)


def raise_planned_to(connection: Connection, job_id: str) -> None:
    """Let `planned_to` be the first row that waits, after the rows there have ceased to.

    It takes the job's lock first: so it sees what others have planned meanwhile.
    """
    key = {"of_job": job_id}
    standing = connection.execute(_LOCK, key).one_or_none()
    if standing is None:
        return
    first = _first(connection, job_id, standing.planned_to, standing.total)
    to = standing.total if first is None else first
    if to != standing.planned_to:
        connection.execute(_SET, key | {"to": to})


def lower_planned_to(connection: Connection, job_id: str, row_index: int) -> None:
    """Note that this row waits again, and none before it."""
    connection.execute(_LOWER, {"of_job": job_id, "to": row_index})


class PlannedTo:
    """Mends `planned_to` after processes of the version before."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def correct(self) -> int:
        """Find the first row that waits of jobs where nothing seems to wait; returns how many."""
        with self._database.reading() as connection:  # most calls find none, and need no lock
            too_low = connection.scalars(_TOO_LOW).all()
            too_high = connection.scalars(_TOO_HIGH).all()
        for job_id in too_low:
            self._database.write(partial(raise_planned_to, job_id=job_id))
        lowered = sum(self._database.write(partial(_lower, job_id=job_id)) for job_id in too_high)
        return len(too_low) + lowered


def _lower(connection: Connection, job_id: str) -> bool:
    standing = connection.execute(_LOCK, {"of_job": job_id}).one()
    first = _first(connection, job_id, 0, standing.total)
    if first is not None:
        lower_planned_to(connection, job_id, first)
    return first is not None


def _first(connection: Connection, job_id: str, at: int, total: int) -> int | None:
    """The first row from `at` on that waits, which is looked for in windows."""
    window = _FIRST_WINDOW
    while at < total:
        key = {"of_job": job_id, "first": at, "last": at + window - 1}
        found: int | None = connection.scalar(_FIRST, key)
        if found is not None:
            return found
        at += window
        window = min(2 * window, _LARGEST_WINDOW)
    return None
