"""What the leading planner does with batches: their files become jobs, their results files."""

from collections.abc import Collection, Sequence
from datetime import timedelta
from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs import lifecycle
from nightjar.jobs.batch_records import Batch, Finalization, batch_id_of
from nightjar.jobs.errors import LifecycleError
from nightjar.jobs.file_records import FileOutcome
from nightjar.jobs.records import JsonObject
from nightjar.jobs.states import BatchStage
from nightjar.jobs.store.announcing import (
    BATCH_IS_AWAITED,
    announce_batch,
    announce_unread_batch,
)
from nightjar.jobs.store.batch_rows import WITH_JOB, batch_record
from nightjar.jobs.store.batch_tables import batch
from nightjar.jobs.store.common import now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.files import Files
from nightjar.jobs.store.json_text import dump_json
from nightjar.jobs.store.tables import job

_MOST_TENANTS = 100  # whose batches one look finds
_CANCELLED_AT_ONCE = 100  # batches that one transaction ends
_COUNTS = ("counted_to", "output_lines", "output_bytes", "error_lines", "error_bytes")


class StoppedBatchError(LifecycleError):
    """A batch was cancelled while its file was read, or another planner has read it."""


class BatchWork:
    """Takes batches from stage to stage."""

    def __init__(self, database: Database, files: Files) -> None:
        self._database = database
        self._files = files

    def next_to_read(self, skipped: Collection[str], busy: Collection[str]) -> Batch | None:
        """The batch whose file is to be read next, if there is one.

        It is the oldest of a tenant that is not `busy`, if there is one: so that the files of one
        tenant do not keep all others waiting.

        Args:
            skipped: Ids of jobs.
            busy: Tenants of which a file is being read.
        """
        first = sa.func.min(batch.c.job_id).label("first")
        oldest = (
            sa.select(first, batch.c.tenant)
            .where(*_waits_to_be_read(), batch.c.job_id.not_in(skipped))
            .group_by(batch.c.tenant)
            .order_by(first)
            .limit(_MOST_TENANTS)
        )
        with self._database.reading() as connection:
            found = connection.execute(oldest).all()
            if not found:
                return None
            chosen = min(found, key=lambda row: (row.tenant in busy, row.first))
            row = connection.execute(WITH_JOB.where(batch.c.job_id == chosen.first)).one()
            return batch_record(row)

    def still_to_read(self, job_ids: Collection[str]) -> set[str]:
        """Those of these batches that nobody has cancelled or read."""
        statement = sa.select(batch.c.job_id).where(
            batch.c.job_id.in_(job_ids), *_waits_to_be_read()
        )
        with self._database.reading() as connection:
            return set(connection.scalars(statement))

    def count_reading(self, job_id: str, more: int) -> int:
        """Add to the number of readings that came to no end, and return it."""
        counted = (
            sa.update(batch)
            .where(batch.c.job_id == job_id)
            .values(attempts=batch.c.attempts + more)
            .returning(batch.c.attempts)
        )
        return self._database.write(lambda connection: connection.scalar(counted) or 0)

    def landed(self, connection: Connection, job_id: str) -> None:
        """Note, in the transaction that lands the job, that the batch has its rows.

        Raises:
            StoppedBatchError: It was cancelled.
        """
        lifecycle.check_step(lifecycle.BATCH_TRANSITIONS, BatchStage.VALIDATING, BatchStage.LANDED)
        noted = (
            sa.update(batch)
            .where(batch.c.job_id == job_id, *_waits_to_be_read())
            .values(stage=BatchStage.LANDED, in_progress_at=now())
        )
        if not connection.execute(noted).rowcount:
            raise StoppedBatchError(f"batch {batch_id_of(job_id)} is not to be read any more")

    def fail(self, job_id: str, errors: Sequence[JsonObject]) -> bool:
        """End a batch whose file cannot be used; whether it was still to be read."""
        lifecycle.check_step(lifecycle.BATCH_TRANSITIONS, BatchStage.VALIDATING, BatchStage.FAILED)
        failed = (
            sa.update(batch)
            .where(batch.c.job_id == job_id, *_waits_to_be_read())
            .values(
                stage=BatchStage.FAILED,
                ended_at=now(),
                errors=dump_json({"data": list(errors)}),
            )
        )
        return bool(self._database.write(partial(_end_unread, ending=failed)))

    def end_cancelled(self) -> int:
        """End batches that were cancelled before their rows landed; returns how many."""
        lifecycle.check_step(
            lifecycle.BATCH_TRANSITIONS, BatchStage.VALIDATING, BatchStage.CANCELLED
        )
        unread = (batch.c.stage == BatchStage.VALIDATING, batch.c.cancelling_at.is_not(None))
        some = sa.select(batch.c.job_id).where(*unread).limit(_CANCELLED_AT_ONCE)
        number = 0
        while True:
            with self._database.reading() as connection:  # most calls find none, and need no lock
                found = list(connection.scalars(some))
            if not found:
                return number
            ended = (
                sa.update(batch)
                .where(batch.c.job_id.in_(found), *unread)
                .values(stage=BatchStage.CANCELLED, ended_at=now())
            )
            number += self._database.write(partial(_end_unread, ending=ended, cancelled=True))

    def to_finalize(self, limit: int, skipped: Collection[str] = ()) -> list[Finalization]:
        """Batches without result files whose job is over; those that ended first come first."""
        statement = (
            sa.select(batch.c.job_id, *(batch.c[name] for name in _COUNTS))
            .join(job, job.c.id == batch.c.job_id)
            .where(batch.c.stage == BatchStage.LANDED, job.c.finished_at.is_not(None))
            .where(batch.c.job_id.not_in(skipped))
            .order_by(job.c.finished_at, batch.c.job_id)
            .limit(limit)
        )
        with self._database.reading() as connection:
            return [Finalization.of(*row) for row in connection.execute(statement)]

    def note_counted(self, counted: Finalization) -> None:
        """Keep how far the result files are counted: another planner goes on from there."""
        noted = sa.update(batch).where(
            batch.c.job_id == counted.job_id,
            batch.c.stage == BatchStage.LANDED,
            batch.c.counted_to < counted.counted_to,
        )
        values = dict(zip(_COUNTS, counted.counts(), strict=True))
        self._database.write(
            lambda connection: connection.execute(noted.values(values)), durable=False
        )

    def finalize(self, counted: Finalization) -> bool:
        """Make the result files that have lines, and give the batch its last status, at once.

        Returns whether this call did; another planner may have come first.
        """
        lifecycle.check_step(lifecycle.BATCH_TRANSITIONS, BatchStage.LANDED, BatchStage.FINAL)
        return self._database.write(lambda connection: self._finalize(connection, counted))

    def _finalize(self, connection: Connection, counted: Finalization) -> bool:
        moment = now()
        ended = (
            sa.update(batch)
            .where(batch.c.job_id == counted.job_id, batch.c.stage == BatchStage.LANDED)
            .values(stage=BatchStage.FINAL, ended_at=moment)
            .returning(batch.c.tenant, batch.c.output_expires_after_s, BATCH_IS_AWAITED)
        )
        row = connection.execute(ended).one_or_none()
        if row is None:
            return False
        lasts_s = row.output_expires_after_s
        expires_at = None if lasts_s is None else moment + timedelta(seconds=lasts_s)
        kinds: tuple[tuple[str, FileOutcome, str], ...] = (
            ("output_file_id", "succeeded", "output"),
            ("error_file_id", "failed", "errors"),
        )
        made = {
            column: self._files.add_result_file(
                connection,
                row.tenant,
                counted.job_id,
                outcome,
                count.bytes,
                f"{batch_id_of(counted.job_id)}_{name}.jsonl",
                expires_at,
            )
            for (column, outcome, name), count in zip(
                kinds, (counted.output, counted.errors), strict=True
            )
            if count.lines
        }
        if made:
            of_job = batch.c.job_id == counted.job_id
            connection.execute(sa.update(batch).where(of_job).values(made))
        if row.is_awaited:
            announce_batch(connection, counted.job_id)
        return True


def _end_unread(connection: Connection, ending: sa.Update, *, cancelled: bool = False) -> int:
    """End batches whose rows never landed, and announce them; returns how many."""
    told = ending.returning(batch.c.job_id, batch.c.tenant, BATCH_IS_AWAITED)
    ended = connection.execute(told).all()
    for row in ended:
        if row.is_awaited:
            announce_unread_batch(connection, row.tenant, row.job_id, cancelled=cancelled)
    return len(ended)


def _waits_to_be_read() -> tuple[sa.ColumnElement[bool], ...]:
    return batch.c.stage == BatchStage.VALIDATING, batch.c.cancelling_at.is_(None)
