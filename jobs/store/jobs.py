"""Jobs: how they come in, how they stand, and what they wait for."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.records import Job, NewJob
from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.store.common import now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.job_rows import JOB_COLUMNS, find_job, job_record
from nightjar.jobs.store.quotas import Quotas
from nightjar.jobs.store.submission import OnLanding, Submission, submission
from nightjar.jobs.store.tables import LISTED, job, micro_batch
from nightjar.jobs.store.waiting import Waiting, waiting_for

# Made once, as clients poll it. All states by name, so that the index on (state, job_id) is used;
# as text, so that SQLAlchemy need not write them into the statement again each time.
_COUNT_MICRO_BATCHES = (
    sa.select(micro_batch.c.state, sa.func.count())
    .where(
        micro_batch.c.job_id == sa.bindparam("of_job"),
        micro_batch.c.state.in_([sa.literal_column(f"'{state}'") for state in MicroBatchState]),
    )
    .group_by(micro_batch.c.state)
)


class Jobs:
    """Submits jobs and reads them."""

    def __init__(self, database: Database, quotas: Quotas) -> None:
        self._database = database
        self._quotas = quotas

    @contextmanager
    def submit(
        self, new_job: NewJob, on_landing: OnLanding = lambda _: None
    ) -> Iterator[Submission]:
        """Make a job whose rows are added inside the block; it lands when the block ends.

        An exception in the block, or in `on_landing`, the last step of the landing, leaves no trace
        of the job. A known idempotency key or id gives the job that has it (`existing`), also if
        another submission with it lands first. Rejected
        rows, and rows that repeat a custom_id, land as failed results at once. Raises EmptyJobError
        for a job without rows, TooManyRowsError and TooManyRejectedError, ReusedKeyError for
        other content under a known key, and QuotaError where the tenant may add nothing now.
        """
        with submission(self._database, new_job, self._quotas, on_landing) as arriving:
            yield arriving

    def get(self, job_id: str) -> Job:
        """The job as it stands; raises UnknownJobError."""
        with self._database.reading() as connection:
            return find_job(connection, job_id)

    def newest(
        self, limit: int = 20, after: str | None = None, tenant: str | None = None
    ) -> list[Job]:
        """Jobs, newest first, without single calls; `after` is the last id of the page before.

        `tenant` is whose jobs are listed; None lists those of all.
        """
        statement = sa.select(*JOB_COLUMNS).where(LISTED).order_by(job.c.id.desc()).limit(limit)
        if tenant is not None:
            statement = statement.where(job.c.tenant == tenant)
        if after is not None:
            statement = statement.where(job.c.id < after)
        with self._database.reading() as connection:
            return [job_record(row) for row in connection.execute(statement)]

    def get_in_detail(self, job_id: str) -> tuple[Job, dict[MicroBatchState, int]]:
        """The job, and how many of its micro-batches are in each state; every state is there.

        One connection serves both, as clients poll this. Raises UnknownJobError.
        """
        with self._database.reading() as connection:
            return find_job(connection, job_id), _micro_batches(connection, job_id)

    def tenant_of(self, job_id: str) -> str | None:
        """Whose job it is, which never changes; None for an unknown job."""
        with self._database.reading() as connection:
            return connection.scalar(sa.select(job.c.tenant).where(job.c.id == job_id))

    def note_exported(self, job_id: str, finished_at: datetime) -> bool:
        """Note that the results as of this end were exported; False if rows are retried since."""
        unchanged = (job.c.id == job_id, job.c.finished_at == finished_at)
        noted = sa.update(job).where(*unchanged).values(exported_at=now())
        return bool(self._database.write(lambda connection: connection.execute(noted).rowcount))

    def is_stopped(self, job_id: str) -> bool:
        """Whether the job was cancelled or has expired; False for an unknown job."""
        statement = sa.select(job.c.cancel_requested).where(job.c.id == job_id)
        with self._database.reading() as connection:
            return bool(connection.scalar(statement))

    def waiting_for(self, job_id: str) -> Waiting:
        """What keeps the job from going on now; raises UnknownJobError."""
        with self._database.reading() as connection:
            return waiting_for(connection, job_id)


def _micro_batches(connection: Connection, job_id: str) -> dict[MicroBatchState, int]:
    counted: dict[MicroBatchState, int] = dict(
        connection.execute(_COUNT_MICRO_BATCHES, {"of_job": job_id}).all()
    )
    return {state: counted.get(state, 0) for state in MicroBatchState}
