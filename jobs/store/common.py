"""What statements of several parts have in common: conditions, columns and small steps."""

import time
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from nightjar.jobs import lifecycle
from nightjar.jobs.records import MicroBatchRef
from nightjar.jobs.states import JobState
from nightjar.jobs.store.tables import job, micro_batch

AnyRow = Row[*tuple[Any, ...]]

FAULT_STATUS = 500  # a fault of Nightjar, not of the request

# The counters of tokens that jobs, results and cached answers share.
TOKEN_COUNTS = ("prompt_tokens", "completion_tokens", "requested_tokens", "saved_tokens")
REF_COLUMNS = [micro_batch.c[name] for name in MicroBatchRef.__slots__ if name != "urgent"]
OPEN_JOBS = lifecycle.states_before(lifecycle.JOB_TRANSITIONS, JobState.CANCELLING)


def now() -> datetime:
    """The wall clock, for people: of the store's decisions only deadlines use it."""
    return datetime.now(UTC)


def today() -> int:
    """The day of UTC, counted from 1970: tokens are counted by days."""
    return int(time.time() // 86_400)


def octets(column: sa.ColumnElement[Any], *, is_sqlite: bool) -> sa.ColumnElement[int]:
    """How many bytes a text takes as UTF-8."""
    if is_sqlite:  # older versions lack octet_length
        return sa.func.length(sa.cast(column, sa.LargeBinary), type_=sa.BigInteger)
    return sa.func.octet_length(column, type_=sa.BigInteger)  # reads no text


def has_rows(order: sa.Column[int], *where: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """Whether any row meets the conditions; the lookup uses the index that has `order` in it.

    Not EXISTS: PostgreSQL makes a join of it. Where it expects many such rows, it reads the table
    from the start until it finds one. In a big job the rows that are over come first.
    """
    first = sa.select(sa.literal_column("1", sa.Integer)).where(*where).order_by(order).limit(1)
    return first.scalar_subquery().is_not(None)


def set_running(connection: Connection, job_id: str) -> None:
    """Set a queued job running; any other stays as it is."""
    lifecycle.check_step(lifecycle.JOB_TRANSITIONS, JobState.QUEUED, JobState.RUNNING)
    connection.execute(
        sa.update(job)
        .where(job.c.id == job_id, job.c.state == JobState.QUEUED)
        .values(state=JobState.RUNNING, started_at=now())
    )
