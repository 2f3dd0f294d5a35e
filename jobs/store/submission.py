"""Submission: a job and all of its rows become visible at once, or not at all.

Rows are first staged in a temporary table of the submitter's own connection. So a slow upload holds
no lock that a worker waits for. The landing at the end is a few statements inside the database,
whatever the number of rows.
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from nightjar.jobs.records import AGEING_S, NewJob, NewRequest, RejectedRow
from nightjar.jobs.states import JobState
from nightjar.jobs.store.awaiting import raise_planned_to
from nightjar.jobs.store.common import TOKEN_COUNTS, now
from nightjar.jobs.store.database import Database, translated_errors
from nightjar.jobs.store.following import COUNTED_STATES, follow_equals, has_equals
from nightjar.jobs.store.idempotency import stored_key
from nightjar.jobs.store.json_text import dump_json
from nightjar.jobs.store.partitions import ensure_part
from nightjar.jobs.store.parts import PART_MARK
from nightjar.jobs.store.quotas import Quotas
from nightjar.jobs.store.segmented import SegmentedLanding
from nightjar.jobs.store.staged_rows import MOST_TOLD, StagedRows
from nightjar.jobs.store.staging import create_stage, drop_stage, stage, staged
from nightjar.jobs.store.tables import job

logger = logging.getLogger(__name__)

OnLanding = Callable[[Connection], None]

CHUNK_ROWS = 1_000
# On SQLite so many rows land in one transaction; nobody else can write meanwhile.
MOST_AT_ONCE = 20_000


class Submission:
    """A job while its rows arrive; once it has landed, the attributes say what it became.

    existing: The idempotency key was known; `job_id` is the job of that key.
    digest: Of all that was sent, if a key comes with it.
    """

    def __init__(
        self,
        database: Database,
        connection: Connection,
        new_job: NewJob,
        quotas: Quotas,
        on_landing: OnLanding,
    ) -> None:
        self._database = database
        self._connection = connection
        self._new_job = new_job
        self._quotas = quotas
        self._on_landing = on_landing
        self._key = stored_key(new_job.tenant, new_job.idempotency_key)
        self.job_id = new_job.id or new_parted_job_id()
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{self.job_id}"
        self.existing = False
        self.digest: str | None = None
        self.accepted = 0
        self.rejected = 0
        self._staged = 0
        self._refused = 0  # of those that were staged
        self._first_refused: list[RejectedRow] = []

    def add(self, rows: Iterable[NewRequest | RejectedRow]) -> None:
        """Stage rows, in chunks, so that memory stays bounded; no-op for an existing job.

        Raises TooManyRowsError, and TooManyRejectedError with the first rejected row.
        """
        if self.existing:
            return
        remaining = iter(rows)
        while chunk := list(islice(remaining, CHUNK_ROWS)):
            self._check_limits(chunk)
            with translated_errors():
                new = self._new_job
                stage(
                    self._database,
                    self._connection,
                    chunk,
                    tenant=new.tenant,
                    merge_equal=new.merge_equal,
                )

    def _check_limits(self, rows: Sequence[NewRequest | RejectedRow]) -> None:
        limits = self._new_job.limits
        self._staged += len(rows)
        if limits.rows is not None and self._staged > limits.rows:
            raise TooManyRowsError(limits.rows)
        refused = [row for row in rows if type(row) is RejectedRow]
        if not refused:
            return
        self._refused += len(refused)
        room = MOST_TOLD - len(self._first_refused)
        self._first_refused += refused[:room]
        if limits.rejected is not None and self._refused > limits.rejected:
            raise TooManyRejectedError(limits.rejected, self._first_refused)

    def look_up(self) -> None:
        """Find the job of the idempotency key, or of the given id, if there is one."""
        given = self._new_job.id
        if self._key is None and given is None:
            return
        same = job.c.id == given if self._key is None else job.c.idempotency_key == self._key
        known = self._connection.scalar(sa.select(job.c.id).where(same))
        if known is not None:
            self.job_id, self.existing = known, True

    def check_quotas(self, rows: int = 1) -> None:
        """Raise QuotaError unless the tenant may add so many rows now."""
        self._quotas.check_new_job(self._connection, self._new_job.tenant, rows)

    def use_model(self, name: str, *, is_named: bool) -> None:
        """Set the job's model; for submitters who find it in the rows."""
        self._new_job = replace(self._new_job, model=name, names_model=is_named)

    def check_same(self) -> None:
        """Raise ReusedKeyError if the key's job was made of other content.

        A job of the version before has no digest, and a submitter may give none.
        """
        digest = sa.select(job.c.submission_digest).where(job.c.id == self.job_id)
        known = self._connection.scalar(digest)
        self._connection.rollback()
        if None not in (known, self.digest) and known != self.digest:
            raise ReusedKeyError(self.job_id)

    def land(self) -> None:
        """Land the job, its requests, and the results of rejected rows; raises EmptyJobError."""
        connection = self._connection
        total = connection.scalar(sa.select(sa.func.count()).select_from(staged)) or 0
        repeats = has_equals(connection, staged)
        connection.rollback()
        if not total:
            raise EmptyJobError("the job has no rows; send at least one batch line")
        ensure_part(self._database, connection, self.job_id)
        rows = StagedRows(self._database, connection, self.job_id, self._new_job.limits.rejected)
        if self._database.is_sqlite and total > MOST_AT_ONCE:
            self._land_in_segments(rows, total)
            return
        with self._database.landing(connection):
            self.check_quotas(total)
            if not self._insert_job(total):
                self.look_up()
                return
            rows.insert()
            if repeats:
                follow_equals(connection, staged, self.job_id)
            self._count(rows, total)
            rows.close_rejected(self.accepted)
            self._on_landing(connection)

    def _land_in_segments(self, rows: StagedRows, total: int) -> None:
        with self._connection.begin():
            self.check_quotas(total)  # before the work; it is checked again at the end
        landing = SegmentedLanding(
            self._database, self._connection, staged, self.job_id, self._owner, rows.reject
        )

        def finish() -> bool:
            self.check_quotas(total)
            if not self._insert_job(total):
                self.look_up()
                return False
            rows.count_rejected()
            self._count(rows, total)
            rows.note_rejected(self.accepted)
            self._on_landing(self._connection)
            return True

        landing.run(total, finish)

    def _count(self, rows: StagedRows, total: int) -> None:
        self.rejected = rows.rejected
        self.accepted = total - rows.rejected
        if rows.rejected:  # maybe the first one
            raise_planned_to(self._connection, self.job_id)

    def _insert_job(self, total: int) -> bool:
        """Insert the job; False if another submission with its key or its id came first."""
        values = job_values(self._new_job, self.job_id, total)
        values["submission_digest"] = self.digest
        statement = self._database.insert(job).values(values)
        inserted = self._connection.execute(statement.on_conflict_do_nothing().returning(job.c.id))
        return inserted.one_or_none() is not None


def job_values(new_job: NewJob, job_id: str, total: int) -> dict[str, Any]:
    """The columns of a new job's row that are not the defaults."""
    created_at, window = new_job.created_at or now(), new_job.completion_window_s
    values = {
        "id": job_id,
        "state": JobState.QUEUED,
        "model": new_job.model,
        "idempotency_key": stored_key(new_job.tenant, new_job.idempotency_key),
        "metadata": dump_json(new_job.metadata),
        "cancel_requested": False,
        "total": total,
        "created_at": created_at,
        "expires_at": None if window is None else created_at + timedelta(seconds=window),
        "completion_window_s": window,
        "keep_results_s": new_job.keep_results_s,
        "traceparent": new_job.traceparent,
        "priority": new_job.priority,
        "tenant": new_job.tenant,
        "names_model": new_job.names_model,
        "rank_at": created_at - timedelta(seconds=new_job.priority * AGEING_S),
    }
    return values | dict.fromkeys((*COUNTED_STATES.values(), *TOKEN_COUNTS), 0)


@contextmanager
def submission(
    database: Database,
    new_job: NewJob,
    quotas: Quotas,
    on_landing: OnLanding = lambda _: None,
) -> Iterator[Submission]:
    """Open a submission; it lands when the block ends without an exception.

    `on_landing` is the last step of the transaction that lands the job. An exception of it leaves
    no trace of the job.
    """
    with database.uploading() as connection:
        arriving = Submission(database, connection, new_job, quotas, on_landing)
        arriving.look_up()
        if not arriving.existing:
            arriving.check_quotas()
        create_stage(connection)
        try:
            yield arriving
            if not arriving.existing:
                arriving.land()
            if arriving.existing:
                arriving.check_same()
        finally:
            drop_stage(connection)
    logger.info(
        "job submitted",
        extra={
            "action": "job_submitted",
            "job_id": arriving.job_id,
            "accepted": arriving.accepted,
            "rejected": arriving.rejected,
            "existing": arriving.existing,
        },
    )


def new_job_id() -> str:
    """An id that sorts by creation and that nobody can guess; of a job whose rows are in part 0."""
    return f"job_{time.time_ns() // 1_000_000:012x}{secrets.token_hex(8)}"


def new_parted_job_id(age_s: float = 0.0) -> str:
    """The same of a job whose rows are in the part of its day (`jobs/store/parts.py`).

    `age_s` is for tests: so long ago the job is made.
    """
    return f"{id_before(age_s)}{PART_MARK}{secrets.token_hex(8)[1:]}"


def id_before(seconds: float) -> str:
    """An id that sorts between jobs older than so many seconds and younger ones."""
    return f"job_{max(0, int((time.time() - seconds) * 1_000)):012x}"
