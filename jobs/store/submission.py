"""Submission: a job and all of its rows appear in one transaction, or not at all.

Rows are first staged in a temporary table of the submitter's own connection. A
slow upload therefore holds no lock that a worker waits for; the landing at the
end is a few statements inside the database, whatever the number of rows.
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.equality import asked_without_seed, digest
from nightjar.jobs.errors import EmptyJobError
from nightjar.jobs.records import (
    AGEING_S,
    JobState,
    JsonObject,
    NewJob,
    NewRequest,
    RejectedRow,
    RequestState,
)
from nightjar.jobs.store.base import StorePart, dump_json, now
from nightjar.jobs.store.bodies import dump_body
from nightjar.jobs.store.database import Database, translated_errors
from nightjar.jobs.store.following import follow_equals, has_equals
from nightjar.jobs.store.landing import SegmentedLanding, duplicate_error
from nightjar.jobs.store.tables import BigId, job, request, result

logger = logging.getLogger(__name__)

CHUNK_ROWS = 1_000
# So many rows land in one transaction, on SQLite, which lets nobody else write meanwhile.
MOST_AT_ONCE = 20_000
REJECTED_STATUS = 400

# A table of the connection, not of the schema: Alembic must not see it.
_staged = sa.Table(
    "nightjar_staged_row",
    sa.MetaData(),
    sa.Column("row_index", BigId, primary_key=True, autoincrement=False),
    sa.Column("line", sa.BigInteger, nullable=False),
    sa.Column("custom_id", sa.Text),
    sa.Column("kind", sa.String(32)),
    sa.Column("body", sa.Text),
    sa.Column("error_code", sa.String(64)),  # null: accepted so far
    sa.Column("error_message", sa.Text),
    sa.Column("error_param", sa.Text),
    sa.Column("digest", sa.LargeBinary),  # the same for requests that may be merged
    prefixes=["TEMPORARY"],
)


class Submission:
    """A job while its rows arrive; what it became stands in its attributes when it has landed."""

    def __init__(self, database: Database, connection: Connection, new_job: NewJob) -> None:
        self._database = database
        self._connection = connection
        self._new_job = new_job
        self.job_id = new_job_id()
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{self.job_id}"
        self.existing = False  # the idempotency key was known: `job_id` is the job it made
        self.accepted = 0
        self.rejected = 0

    def add(self, rows: Iterable[NewRequest | RejectedRow]) -> None:
        """Stage rows, in chunks, so that memory stays bounded; ignored for a known job."""
        if self.existing:
            return
        remaining = iter(rows)
        while chunk := list(islice(remaining, CHUNK_ROWS)):
            with translated_errors():
                merge = self._new_job.merge_equal
                self._stage([_staged_row(row, merge_equal=merge) for row in chunk])

    def _stage(self, rows: list[tuple[Any, ...]]) -> None:
        with self._connection.begin():
            if self._database.is_sqlite:
                marks = ", ".join("?" * len(_staged.c))
                insert = f"INSERT INTO {_staged.name} VALUES ({marks})"  # noqa: S608
                self._connection.exec_driver_sql(insert, rows)
                return
            self._copy(rows)

    def _copy(self, rows: list[tuple[Any, ...]]) -> None:
        """PostgreSQL's fastest way in, which SQLAlchemy does not know."""
        cursor: Any = self._connection.connection.cursor()
        driver_error = self._connection.dialect.loaded_dbapi.Error
        try:
            with cursor, cursor.copy(f"COPY {_staged.name} FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)
        except driver_error as error:
            raise sa.exc.DBAPIError.instance(
                "COPY", None, error, driver_error, hide_parameters=True
            ) from error

    def look_up(self) -> None:
        """Whether the idempotency key has made a job before."""
        key = self._new_job.idempotency_key
        if key is None:
            return
        known = self._connection.scalar(sa.select(job.c.id).where(job.c.idempotency_key == key))
        if known is not None:
            self.job_id, self.existing = known, True

    def land(self) -> None:
        """The one transaction: the job, its requests, and the results of rejected rows."""
        connection = self._connection
        total = connection.scalar(sa.select(sa.func.count()).select_from(_staged)) or 0
        repeats = has_equals(connection, _staged)
        connection.rollback()
        if not total:
            raise EmptyJobError("the job has no rows; send at least one batch line")
        if self._database.is_sqlite and total > MOST_AT_ONCE:
            self._land_in_segments(total)
            return
        with self._database.landing(connection):
            if not self._insert_job(total):
                self.look_up()
                return
            self._insert_requests()
            if repeats:
                follow_equals(connection, _staged, self.job_id)
            self.accepted = total - self.rejected
            self._close_rejected()

    def _land_in_segments(self, total: int) -> None:
        row = _staged.c
        landing = SegmentedLanding(
            self._database, self._connection, _staged, self.job_id, self._owner, self._reject
        )

        def finish() -> bool:
            if not self._insert_job(total):
                self.look_up()
                return False
            count = sa.select(sa.func.count()).where(row.error_code.is_not(None))
            self.rejected = self._connection.scalar(count) or 0
            self.accepted = total - self.rejected
            self._count_rejected()
            return True

        landing.run(total, finish)

    def _insert_job(self, total: int) -> bool:
        """False if another submission with the same idempotency key came first."""
        new_job = self._new_job
        created_at, window = now(), new_job.completion_window_s
        values = {
            "id": self.job_id,
            "state": JobState.QUEUED,
            "model": new_job.model,
            "idempotency_key": new_job.idempotency_key,
            "metadata": dump_json(new_job.metadata),
            "cancel_requested": False,
            "total": total,
            "created_at": created_at,
            "expires_at": None if window is None else created_at + timedelta(seconds=window),
            "priority": new_job.priority,
            "rank_at": created_at - timedelta(seconds=new_job.priority * AGEING_S),
        }
        counters = ("completed", "failed", "cancelled", "prompt_tokens", "completion_tokens")
        values |= dict.fromkeys((*counters, "requested_tokens", "saved_tokens"), 0)
        statement = self._database.insert(job).values(values)
        inserted = self._connection.execute(
            statement.on_conflict_do_nothing(index_elements=[job.c.idempotency_key]).returning(
                job.c.id
            )
        )
        return inserted.one_or_none() is not None

    def _insert_requests(self) -> None:
        """The accepted rows; whoever repeats a custom_id is found by the index and rejected."""
        connection, job_id = self._connection, sa.literal(self.job_id)
        columns = ["job_id", "row_index", "line", "custom_id", "kind", "body", "state"]
        row = _staged.c
        accepted = (
            sa.select(
                job_id,
                row.row_index,
                row.line,
                row.custom_id,
                row.kind,
                row.body,
                sa.literal(RequestState.QUEUED.value),
            )
            .where(row.error_code.is_(None))
            .order_by(row.row_index)
        )
        connection.execute(
            self._database.insert(request)
            .from_select(columns, accepted)
            .on_conflict_do_nothing(
                index_elements=[request.c.job_id, request.c.custom_id],
                index_where=request.c.kind.is_not(None),
            )
        )
        self._mark_duplicates()
        rejected = (
            sa.select(
                job_id,
                row.row_index,
                row.line,
                row.custom_id,
                sa.null(),
                sa.null(),
                sa.literal(RequestState.FAILED.value),
            )
            .where(row.error_code.is_not(None))
            .order_by(row.row_index)
        )
        connection.execute(sa.insert(request).from_select(columns, rejected))
        count = sa.select(sa.func.count()).where(row.error_code.is_not(None))
        self.rejected = connection.scalar(count) or 0

    def _mark_duplicates(self) -> None:
        """Staged rows that the index kept out get their error, which names the first line."""
        row, first = _staged.c, request.alias("first")
        landed = sa.exists().where(
            request.c.job_id == self.job_id, request.c.row_index == row.row_index
        )
        first_line = (
            sa.select(sa.cast(first.c.line, sa.Text))
            .where(
                first.c.job_id == self.job_id,
                first.c.custom_id == row.custom_id,
                first.c.kind.is_not(None),
            )
            .scalar_subquery()
        )
        self._connection.execute(
            sa.update(_staged)
            .where(row.error_code.is_(None), ~landed)
            .values(duplicate_error(row, first_line))
        )

    def _close_rejected(self) -> None:
        """Failed results for the rejected rows; a job of such rows alone is over."""
        if self.rejected:
            self._reject(_staged.c.error_code.is_not(None))
            self._count_rejected()

    def _reject(self, which: sa.ColumnElement[bool]) -> None:
        """Failed results for those of the staged rows."""
        row = _staged.c
        zeros = {
            name: sa.literal(0)
            for name in ("prompt_tokens", "completion_tokens", "requested_tokens", "saved_tokens")
        }
        values: dict[str, Any] = {
            "request_id": request.c.id,
            "job_id": request.c.job_id,
            "row_index": request.c.row_index,
            "status_code": sa.literal(REJECTED_STATUS),
            "error_code": row.error_code,
            "error_message": row.error_message,
            "error_param": row.error_param,
            "created_at": sa.literal(now(), result.c.created_at.type),
            **zeros,
        }
        rejected = (
            sa.select(*values.values())
            .select_from(request)
            .join(_staged, row.row_index == request.c.row_index)
            .where(request.c.job_id == self.job_id, which)
        )
        self._connection.execute(sa.insert(result).from_select(list(values), rejected))

    def _count_rejected(self) -> None:
        if not self.rejected:
            return
        closing = sa.update(job).where(job.c.id == self.job_id).values(failed=self.rejected)
        if not self.accepted:
            closing = closing.values(state=JobState.FAILED, finished_at=now())
        self._connection.execute(closing)


class SubmissionStore(StorePart):
    """How jobs come in."""

    @contextmanager
    def submission(self, new_job: NewJob) -> Iterator[Submission]:
        """A job whose rows are added inside the block; it lands when the block ends.

        An exception in the block leaves no trace of the job. With a known
        idempotency key the job of that key is returned (`existing`), also when
        another submission with the key lands first. Rejected rows, and those
        that repeat a custom_id, land as failed results at once. Raises
        EmptyJobError for a job without rows.
        """
        with translated_errors(), self._database.engine.connect() as connection:
            submission = Submission(self._database, connection, new_job)
            submission.look_up()
            _staged.create(connection)
            connection.commit()
            try:
                yield submission
                if not submission.existing:
                    submission.land()
            finally:
                _drop_stage(connection)
        logger.info(
            "job submitted",
            extra={
                "action": "job_submitted",
                "job_id": submission.job_id,
                "accepted": submission.accepted,
                "rejected": submission.rejected,
                "existing": submission.existing,
            },
        )


def new_job_id() -> str:
    """An id that sorts by creation and that nobody can guess."""
    return f"job_{time.time_ns() // 1_000_000:012x}{secrets.token_hex(8)}"


def _drop_stage(connection: Connection) -> None:
    """Leave the pooled connection as it was; one that is broken leaves the pool."""
    try:
        connection.rollback()
        _staged.drop(connection)
        connection.commit()
    except sa.exc.DBAPIError:
        connection.invalidate()


def _staged_row(row: NewRequest | RejectedRow, *, merge_equal: bool) -> tuple[Any, ...]:
    """The row's values in the order of the staging table's columns."""
    if isinstance(row, RejectedRow):
        error = (row.code, row.message, row.param)
        return (row.index, row.line, row.custom_id, None, None, *error, None)
    body = dump_body(row.body)
    same = _digest(row.body, body) if merge_equal else None
    return (row.index, row.line, row.custom_id, row.kind.value, body, None, None, None, same)


def _digest(body: JsonObject, dumped: str) -> bytes | None:
    """The digest of a body whose text is `dumped`; None for one that is like no other."""
    asked = asked_without_seed(body)
    if asked is None:
        return None
    return digest(dumped if asked is body else dump_body(asked))
