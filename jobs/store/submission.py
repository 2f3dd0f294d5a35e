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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import (
    EmptyJobError,
    ReusedKeyError,
    TooManyRejectedError,
    TooManyRowsError,
)
from nightjar.jobs.records import (
    AGEING_S,
    JobState,
    NewJob,
    NewRequest,
    RejectedRow,
    RequestState,
)
from nightjar.jobs.store.base import StorePart, dump_json, now
from nightjar.jobs.store.database import Database, translated_errors
from nightjar.jobs.store.following import follow_equals, has_equals
from nightjar.jobs.store.landings import new_token, note
from nightjar.jobs.store.segmented import SegmentedLanding, duplicate_error
from nightjar.jobs.store.staging import drop_stage, stage, staged
from nightjar.jobs.store.tables import job, request, result

logger = logging.getLogger(__name__)

CHUNK_ROWS = 1_000
# So many rows land in one transaction, on SQLite, which lets nobody else write meanwhile.
MOST_AT_ONCE = 20_000
REJECTED_STATUS = 400


class Submission:
    """A job while its rows arrive; what it became stands in its attributes when it has landed."""

    def __init__(self, database: Database, connection: Connection, new_job: NewJob) -> None:
        self._database = database
        self._connection = connection
        self._new_job = new_job
        self.job_id = new_job_id()
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{self.job_id}"
        self.existing = False  # the idempotency key was known: `job_id` is the job it made
        self.digest: str | None = None  # of all that was sent, where a key comes with it
        self.accepted = 0
        self.rejected = 0
        self._token = new_token()  # of the landing of rejected rows
        self._staged = 0
        self._refused = 0  # of those that were staged
        self._first_refused: RejectedRow | None = None

    def add(self, rows: Iterable[NewRequest | RejectedRow]) -> None:
        """Stage rows, in chunks, so that memory stays bounded; ignored for a known job.

        Raises TooManyRowsError, and TooManyRejectedError with the first rejected one.
        """
        if self.existing:
            return
        remaining = iter(rows)
        while chunk := list(islice(remaining, CHUNK_ROWS)):
            self._check_limits(chunk)
            with translated_errors():
                merge = self._new_job.merge_equal
                stage(self._database, self._connection, chunk, merge_equal=merge)

    def _check_limits(self, rows: Sequence[NewRequest | RejectedRow]) -> None:
        limits = self._new_job.limits
        self._staged += len(rows)
        if limits.rows is not None and self._staged > limits.rows:
            raise TooManyRowsError(limits.rows)
        refused = [row for row in rows if type(row) is RejectedRow]
        if not refused:
            return
        self._refused += len(refused)
        self._first_refused = self._first_refused or refused[0]
        if limits.rejected is not None and self._refused > limits.rejected:
            raise TooManyRejectedError(limits.rejected, self._first_refused.message)

    def look_up(self) -> None:
        """Whether the idempotency key has made a job before."""
        key = self._new_job.idempotency_key
        if key is None:
            return
        known = self._connection.scalar(sa.select(job.c.id).where(job.c.idempotency_key == key))
        if known is not None:
            self.job_id, self.existing = known, True

    def check_same(self) -> None:
        """Raise ReusedKeyError where the key's job was made of something else.

        A job of the version before has no digest, and a submitter may give none.
        """
        digest = sa.select(job.c.submission_digest).where(job.c.id == self.job_id)
        known = self._connection.scalar(digest)
        self._connection.rollback()
        if None not in (known, self.digest) and known != self.digest:
            raise ReusedKeyError(self.job_id)

    def land(self) -> None:
        """The one transaction: the job, its requests, and the results of rejected rows."""
        connection = self._connection
        total = connection.scalar(sa.select(sa.func.count()).select_from(staged)) or 0
        repeats = has_equals(connection, staged)
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
                follow_equals(connection, staged, self.job_id)
            self.accepted = total - self.rejected
            self._close_rejected()

    def _land_in_segments(self, total: int) -> None:
        landing = SegmentedLanding(
            self._database, self._connection, staged, self.job_id, self._owner, self._reject
        )

        def finish() -> bool:
            if not self._insert_job(total):
                self.look_up()
                return False
            self._tally()
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
            "submission_digest": self.digest,
            "metadata": dump_json(new_job.metadata),
            "cancel_requested": False,
            "total": total,
            "created_at": created_at,
            "expires_at": None if window is None else created_at + timedelta(seconds=window),
            "completion_window_s": window,
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
        row = staged.c
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
        self._tally()

    def _tally(self) -> None:
        """Count the rejected rows; raises TooManyRejectedError."""
        row, connection = staged.c, self._connection
        count = sa.select(sa.func.count()).where(row.error_code.is_not(None))
        self.rejected = connection.scalar(count) or 0
        limit = self._new_job.limits.rejected
        if limit is not None and self.rejected > limit:
            first = sa.select(row.error_message).where(row.error_code.is_not(None))
            message = connection.scalar(first.order_by(row.row_index).limit(1))
            raise TooManyRejectedError(limit, str(message))

    def _mark_duplicates(self) -> None:
        """Staged rows that the index kept out get their error, which names the first line."""
        row, first = staged.c, request.alias("first")
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
            sa.update(staged)
            .where(row.error_code.is_(None), ~landed)
            .values(duplicate_error(row, first_line))
        )

    def _close_rejected(self) -> None:
        """Failed results for the rejected rows; a job of such rows alone is over."""
        if self.rejected:
            self._reject(staged.c.error_code.is_not(None))
            self._count_rejected()

    def _reject(self, which: sa.ColumnElement[bool]) -> None:
        """Failed results for those of the staged rows."""
        row = staged.c
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
            "landing": sa.literal(self._token, sa.BigInteger),
            **zeros,
        }
        rejected = (
            sa.select(*values.values())
            .select_from(request)
            .join(staged, row.row_index == request.c.row_index)
            .where(request.c.job_id == self.job_id, which)
        )
        self._connection.execute(sa.insert(result).from_select(list(values), rejected))

    def _count_rejected(self) -> None:
        if not self.rejected:
            return
        self._note_rejected()
        closing = sa.update(job).where(job.c.id == self.job_id).values(failed=self.rejected)
        if not self.accepted:
            closing = closing.values(state=JobState.FAILED, finished_at=now())
        self._connection.execute(closing)

    def _note_rejected(self) -> None:
        """The rejected rows come first in the job's order of landing."""
        ids = self._connection.scalars(
            sa.select(result.c.request_id)
            .where(result.c.job_id == self.job_id)
            .order_by(result.c.row_index)
        )
        for part in ids.partitions(CHUNK_ROWS):
            note(self._connection, self.job_id, part, self._token)


class SubmissionStore(StorePart):
    """How jobs come in."""

    @contextmanager
    def submission(self, new_job: NewJob) -> Iterator[Submission]:
        """A job whose rows are added inside the block; it lands when the block ends.

        An exception in the block leaves no trace of the job. With a known
        idempotency key the job of that key is returned (`existing`), also when
        another submission with the key lands first. Rejected rows, and those
        that repeat a custom_id, land as failed results at once. Raises
        EmptyJobError for a job without rows, TooManyRowsError and
        TooManyRejectedError, and ReusedKeyError for other content under a known key.
        """
        with self._database.uploading() as connection:
            submission = Submission(self._database, connection, new_job)
            submission.look_up()
            staged.create(connection)
            connection.commit()
            try:
                yield submission
                if not submission.existing:
                    submission.land()
                if submission.existing:
                    submission.check_same()
            finally:
                drop_stage(connection)
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
