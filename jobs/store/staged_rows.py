"""Landing staged rows: accepted ones become requests, rejected ones also get failed results."""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import TooManyRejectedError
from nightjar.jobs.records import RejectedRow
from nightjar.jobs.states import JobState, RequestState
from nightjar.jobs.store.announcing import IS_AWAITED, announce_end
from nightjar.jobs.store.common import TOKEN_COUNTS, now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.landings import new_token, note
from nightjar.jobs.store.parts import PART_BITS, InPartOf, part_of_job
from nightjar.jobs.store.segmented import duplicate_error
from nightjar.jobs.store.staging import insert_packs, staged
from nightjar.jobs.store.tables import job, request, result

REJECTED_STATUS = 400
_IDS = sa.Sequence("request_id_seq", data_type=sa.BigInteger)
_IDS_PER_NOTE = 1_000
MOST_TOLD = 100  # rejected rows that an error repeats


class StagedRows:
    """Lands the staged rows of one job; `rejected` counts the rejected ones.

    Args:
        database: Where the job lands.
        connection: The submitter's own, which holds the staged rows.
        job_id: The job.
        most_rejected: Most rejected rows that the job may have.
    """

    def __init__(
        self, database: Database, connection: Connection, job_id: str, most_rejected: int | None
    ) -> None:
        self._database = database
        self._connection = connection
        self._job_id = job_id
        self._most_rejected = most_rejected
        self._token = new_token()  # of the landing of rejected rows
        # On SQLite the database numbers the rows, and on PostgreSQL those of part 0.
        self._numbered: dict[str, sa.ColumnElement[int]] = {}
        if not database.is_sqlite and (part := part_of_job(job_id)):
            self._numbered = {"id": sa.literal(part << PART_BITS) + _IDS.next_value()}
        self._is_own = sa.and_(result.c.job_id == job_id, InPartOf(result.c.request_id, job_id))
        self.rejected = 0

    def insert(self) -> None:
        """Insert the accepted rows as requests, then the rejected ones.

        The index finds rows that repeat a custom_id; they are rejected.
        """
        connection, job_id = self._connection, sa.literal(self._job_id)
        columns = ["job_id", "row_index", "line", "custom_id", "kind", "state", *self._numbered]
        row = staged.c
        accepted = (
            sa.select(
                job_id,
                row.row_index,
                row.line,
                row.custom_id,
                row.kind,
                sa.literal(RequestState.QUEUED.value),
                *self._numbered.values(),
            )
            .where(row.error_code.is_(None))
            .order_by(row.row_index)
        )
        insert = self._database.insert(request).from_select(columns, accepted)
        try:
            # Most uploads repeat no custom_id. A row that may conflict is logged by PostgreSQL in
            # one record more.
            with connection.begin_nested():
                connection.execute(insert)
        except sa.exc.IntegrityError:
            # Names no index: on PostgreSQL each partition has its own.
            connection.execute(insert.on_conflict_do_nothing())
            self._mark_duplicates()
        rejected = (
            sa.select(
                job_id,
                row.row_index,
                row.line,
                row.custom_id,
                sa.null(),
                sa.literal(RequestState.FAILED.value),
                *self._numbered.values(),
            )
            .where(row.error_code.is_not(None))
            .order_by(row.row_index)
        )
        connection.execute(sa.insert(request).from_select(columns, rejected))
        insert_packs(connection, self._job_id)
        self.count_rejected()

    def count_rejected(self) -> None:
        """Count the staged rows that are rejected; raises TooManyRejectedError."""
        row, connection = staged.c, self._connection
        count = sa.select(sa.func.count()).where(row.error_code.is_not(None))
        self.rejected = connection.scalar(count) or 0
        if self._most_rejected is not None and self.rejected > self._most_rejected:
            columns = (row.row_index, row.line, row.custom_id)
            told = (row.error_code, row.error_message, row.error_param)
            first = sa.select(*columns, *told).where(row.error_code.is_not(None))
            found = connection.execute(first.order_by(row.row_index).limit(MOST_TOLD))
            raise TooManyRejectedError(self._most_rejected, [RejectedRow(*one) for one in found])

    def _mark_duplicates(self) -> None:
        """Give the staged rows that the index kept out their error, which names the first line."""
        row, first = staged.c, request.alias("first")
        its_first = (
            first.c.job_id == self._job_id,
            InPartOf(first.c.id, self._job_id),
            first.c.custom_id == row.custom_id,
            first.c.kind.is_not(None),
        )
        # A scalar subquery, which is looked up in the unique index for each row. PostgreSQL has no
        # statistics of the new rows: it would join by a nested loop over all of them.
        landed_as = sa.select(first.c.row_index).where(*its_first).scalar_subquery()
        first_line = sa.select(sa.cast(first.c.line, sa.Text)).where(*its_first).scalar_subquery()
        self._connection.execute(
            sa.update(staged)
            .where(row.error_code.is_(None), row.row_index != landed_as)
            .values(duplicate_error(row, first_line))
        )

    def close_rejected(self, accepted: int) -> None:
        """Land failed results for the rejected rows; a job of such rows alone is over."""
        if self.rejected:
            self.reject(staged.c.error_code.is_not(None))
            self.note_rejected(accepted)

    def reject(self, which: sa.ColumnElement[bool]) -> None:
        """Insert failed results for the staged rows that meet the condition."""
        row = staged.c
        zeros = {name: sa.literal(0) for name in TOKEN_COUNTS}
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
            .where(request.c.job_id == self._job_id, InPartOf(request.c.id, self._job_id), which)
        )
        self._connection.execute(sa.insert(result).from_select(list(values), rejected))

    def append_rejected(self) -> None:
        """Land failed results for the rejected rows of a job that has others; the caller counts."""
        if not self.rejected:
            return
        self.reject(staged.c.error_code.is_not(None))
        ids = self._connection.scalars(
            sa.select(result.c.request_id)
            .join(staged, staged.c.row_index == result.c.row_index)
            .where(self._is_own, staged.c.error_code.is_not(None))
            .order_by(result.c.row_index)
        )
        for part in ids.partitions(_IDS_PER_NOTE):
            note(self._connection, self._job_id, part, self._token)

    def note_rejected(self, accepted: int) -> None:
        """Count the rejected rows in the job; they come first in its order of landing."""
        if not self.rejected:
            return
        ids = self._connection.scalars(
            sa.select(result.c.request_id).where(self._is_own).order_by(result.c.row_index)
        )
        for part in ids.partitions(_IDS_PER_NOTE):
            note(self._connection, self._job_id, part, self._token)
        closing = sa.update(job).where(job.c.id == self._job_id).values(failed=self.rejected)
        if not accepted:
            closing = closing.values(state=JobState.FAILED, finished_at=now())
        is_awaited = self._connection.scalar(closing.returning(IS_AWAITED))
        if is_awaited and not accepted:
            announce_end(self._connection, self._job_id)
