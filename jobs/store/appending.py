"""Open jobs: made without rows, they get them in parts, and end once they are sealed.

One producer appends to a job. Each part says how many rows came before it, so that a part that is
sent twice is stored once, and a part that is missing is noticed.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.append_records import MOST_ROWS_AHEAD, Appended
from nightjar.jobs.errors import AppendPlaceError, LifecycleError, QuotaError, UnknownJobError
from nightjar.jobs.records import Job, NewJob, NewRequest, RejectedRow
from nightjar.jobs.store.awaiting import raise_planned_to
from nightjar.jobs.store.common import OPEN_JOBS, AnyRow
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.following import follow_equals, has_equals
from nightjar.jobs.store.idempotency import stored_key
from nightjar.jobs.store.job_rows import find_job
from nightjar.jobs.store.outcomes import Outcomes
from nightjar.jobs.store.partitions import ensure_part
from nightjar.jobs.store.quotas import TOO_MANY_WAIT, Quotas
from nightjar.jobs.store.staged_rows import StagedRows
from nightjar.jobs.store.staging import create_stage, drop_stage, stage, staged
from nightjar.jobs.store.submission import CHUNK_ROWS, job_values, new_parted_job_id
from nightjar.jobs.store.tables import job

_AHEAD_RETRY_S = 1.0
_STANDING = (
    sa.select(
        job.c.tenant,
        job.c.state,
        job.c.total,
        job.c.completed,
        job.c.failed,
        job.c.cancelled,
        job.c.takes_rows,
        job.c.append_digest,
    )
    .where(job.c.id == sa.bindparam("of_job"))
    .with_for_update()
)


class Appending:
    """Opens jobs, appends rows to them and seals them."""

    def __init__(self, database: Database, outcomes: Outcomes, quotas: Quotas) -> None:
        self._database = database
        self._outcomes = outcomes
        self._quotas = quotas

    def open(self, new_job: NewJob) -> tuple[Job, bool]:
        """Make a job without rows; gives it, and whether its idempotency key was known.

        Raises:
            QuotaError: The tenant may add nothing now.
        """
        key = stored_key(new_job.tenant, new_job.idempotency_key)
        job_id = new_job.id or new_parted_job_id()

        def work(connection: Connection) -> tuple[str, bool]:
            known = None
            if key is not None:
                known = connection.scalar(sa.select(job.c.id).where(job.c.idempotency_key == key))
            if known is not None:
                return known, True
            self._quotas.check_new_job(connection, new_job.tenant, 0)
            values = job_values(new_job, job_id, 0) | {"takes_rows": True}
            inserted = self._database.insert(job).values(values).on_conflict_do_nothing()
            if connection.execute(inserted.returning(job.c.id)).one_or_none() is not None:
                return job_id, False
            # Another call with the same key was faster, and has committed.
            first = sa.select(job.c.id).where(job.c.idempotency_key == key)
            return str(connection.scalar(first)), True

        found, existing = self._database.write(work)
        with self._database.reading() as connection:
            return find_job(connection, found), existing

    def append(
        self, job_id: str, first: int, rows: Sequence[NewRequest | RejectedRow], digest: str
    ) -> Appended:
        """Append rows, which are numbered from `first` on; all of them, or none.

        Rejected rows, and rows that repeat a custom_id of the job, land as failed results at once.

        Args:
            job_id: The job.
            first: How many rows the job has.
            rows: At least one.
            digest: Of these rows: the same part that is sent again is not stored again.

        Raises:
            UnknownJobError: There is no such job.
            LifecycleError: The job is sealed, or was stopped.
            AppendPlaceError: The job has another number of rows.
            QuotaError: Too many rows of the job, or of its tenant, have no outcome yet.
        """
        with self._database.uploading() as connection:
            owner = connection.scalar(sa.select(job.c.tenant).where(job.c.id == job_id))
            if owner is None:
                raise UnknownJobError(job_id)
            create_stage(connection)
            try:
                for begin in range(0, len(rows), CHUNK_ROWS):
                    part = rows[begin : begin + CHUNK_ROWS]
                    stage(self._database, connection, part, tenant=owner, merge_equal=True)
                repeats = has_equals(connection, staged)
                connection.rollback()
                ensure_part(self._database, connection, job_id)
                with self._database.landing(connection):
                    return self._land(connection, job_id, first, len(rows), digest, repeats=repeats)
            finally:
                drop_stage(connection)

    def _land(
        self,
        connection: Connection,
        job_id: str,
        first: int,
        count: int,
        digest: str,
        *,
        repeats: bool,
    ) -> Appended:
        standing = _locked(connection, job_id)
        if standing.append_digest == digest and standing.total == first + count:
            return Appended(standing.total, 0, existing=True)
        _check_takes_rows(job_id, standing)
        if standing.total != first:
            raise AppendPlaceError(job_id, first, standing.total)
        _check_ahead(standing, count)
        self._quotas.check_new_job(connection, standing.tenant, count)
        landing = StagedRows(self._database, connection, job_id, None)
        landing.insert()
        if repeats:
            follow_equals(connection, staged, job_id)
        landing.append_rejected()
        connection.execute(
            sa.update(job)
            .where(job.c.id == job_id)
            .values(
                total=job.c.total + count,
                failed=job.c.failed + landing.rejected,
                append_digest=digest,
            )
        )
        raise_planned_to(connection, job_id)  # the first new row may be rejected, or follow another
        return Appended(first + count, landing.rejected)

    def seal(self, job_id: str, rows: int | None = None) -> Job:
        """Take no more rows; the job ends when all of its rows have their outcome.

        A job that is sealed stays as it is. `rows` is how many the caller has appended.

        Raises:
            UnknownJobError: There is no such job.
            LifecycleError: The job has no rows: cancel it.
            AppendPlaceError: The job has another number of rows.
        """

        def work(connection: Connection) -> None:
            standing = _locked(connection, job_id)
            if rows not in (None, standing.total):
                raise AppendPlaceError(job_id, rows or 0, standing.total)
            if not standing.takes_rows:
                return
            if not standing.total:
                raise LifecycleError(f"job {job_id} has no rows; append some, or cancel it")
            sealed = sa.update(job).where(job.c.id == job_id).values(takes_rows=False)
            connection.execute(sealed)
            self._outcomes.end_if_over(connection, job_id)

        self._database.write(work)
        with self._database.reading() as connection:
            return find_job(connection, job_id)


def _locked(connection: Connection, job_id: str) -> AnyRow:
    standing = connection.execute(_STANDING, {"of_job": job_id}).one_or_none()
    if standing is None:
        raise UnknownJobError(job_id)
    return standing


def _check_takes_rows(job_id: str, standing: AnyRow) -> None:
    # A GPU worker of the version before ends an open job with the outcome of its last row.
    if standing.takes_rows and standing.state in OPEN_JOBS:
        return
    why = "was sealed" if standing.state in OPEN_JOBS else f"is {standing.state.value}"
    raise LifecycleError(f"job {job_id} {why}: it takes no more rows; open another one")


def _check_ahead(standing: AnyRow, count: int) -> None:
    """Keep the producer at most so many rows before the computing."""
    waiting = standing.total - standing.completed - standing.failed - standing.cancelled
    if waiting and waiting + count > MOST_ROWS_AHEAD:
        raise QuotaError(
            TOO_MANY_WAIT,
            f"{waiting} rows of this job have no outcome yet, and an open job may have "
            f"{MOST_ROWS_AHEAD}; append again when some have ended",
            _AHEAD_RETRY_S,
        )
