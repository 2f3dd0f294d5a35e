"""Batches, as those who make them see them."""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.batch_records import Batch, NewBatch, job_id_of
from nightjar.jobs.errors import LifecycleError, UnknownBatchError
from nightjar.jobs.states import BatchStage, BatchStatus, JobState
from nightjar.jobs.store.batch_rows import WITH_JOB, batch_record, find_batch
from nightjar.jobs.store.batch_tables import batch
from nightjar.jobs.store.common import OPEN_JOBS, now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.files import Files
from nightjar.jobs.store.json_text import dump_json
from nightjar.jobs.store.submission import new_job_id
from nightjar.jobs.store.tables import job

_OVER = frozenset(
    {BatchStatus.FAILED, BatchStatus.FINALIZING, BatchStatus.COMPLETED, BatchStatus.EXPIRED}
)


class Batches:
    """Makes batches, reads and cancels them; each tenant sees its own."""

    def __init__(self, database: Database, files: Files) -> None:
        self._database = database
        self._files = files

    def create(self, new: NewBatch) -> Batch:
        """Make a batch whose file is still to be read.

        Raises:
            UnknownFileError: The tenant has no such file.
        """
        values = {
            "job_id": new_job_id(),
            "tenant": new.tenant,
            "stage": BatchStage.VALIDATING,
            "endpoint": new.endpoint,
            "input_file_id": new.input_file_id,
            "completion_window": new.completion_window,
            "completion_window_s": new.completion_window_s,
            "metadata": dump_json(new.metadata),
            "strict": new.strict,
            "model": new.model,
            "priority": new.priority,
            "output_expires_after_s": new.output_expires_after_s,
            "created_at": now(),
        }

        def work(connection: Connection) -> Batch:
            # Locked: nobody can delete the file between this look and the batch that holds it.
            self._files.find(connection, new.input_file_id, new.tenant, lock=True)
            connection.execute(sa.insert(batch).values(values))
            row = connection.execute(WITH_JOB.where(batch.c.job_id == values["job_id"])).one()
            return batch_record(row)

        return self._database.write(work)

    def get(self, batch_id: str, tenant: str) -> Batch:
        """The tenant's batch; raises UnknownBatchError."""
        with self._database.reading() as connection:
            return find_batch(connection, batch_id, tenant)

    def newest(self, limit: int, tenant: str, after: str | None = None) -> list[Batch]:
        """The tenant's batches, newest first, behind the batch `after`.

        Raises:
            UnknownBatchError: The tenant has no batch `after`.
        """
        statement = WITH_JOB.where(batch.c.tenant == tenant).order_by(batch.c.job_id.desc())
        with self._database.reading() as connection:
            if after is not None:
                last = find_batch(connection, after, tenant)
                statement = statement.where(batch.c.job_id < last.job_id)
            return [batch_record(row) for row in connection.execute(statement.limit(limit))]

    def cancel(self, batch_id: str, tenant: str) -> Batch:
        """Ask for a batch to be cancelled; one that is cancelled already stays as it is.

        The planner ends what waits. What has landed stays, and so do rows that are being computed.

        Raises:
            UnknownBatchError: The tenant has no such batch.
            LifecycleError: Every row has its outcome already, or the file could not be used.
        """
        job_id = job_id_of(batch_id)
        if job_id is None:
            raise UnknownBatchError(batch_id)
        owned = (batch.c.job_id == job_id, batch.c.tenant == tenant)

        def work(connection: Connection) -> None:
            # The job before the batch, as everywhere: so nobody waits in a circle.
            is_owned = sa.exists().where(*owned)
            stopped = connection.execute(
                sa.update(job)
                .where(job.c.id == job_id, job.c.state.in_(OPEN_JOBS), is_owned)
                .values(state=JobState.CANCELLING, cancel_requested=True)
            ).rowcount
            noted = sa.update(batch).where(*owned, batch.c.cancelling_at.is_(None))
            if not stopped:
                noted = noted.where(batch.c.stage == BatchStage.VALIDATING)
            connection.execute(noted.values(cancelling_at=now()))

        self._database.write(work)
        found = self.get(batch_id, tenant)
        if found.cancelling_at is None and found.status is BatchStatus.IN_PROGRESS:
            # Its rows landed between the two statements, where neither saw them.
            self._database.write(work)
            found = self.get(batch_id, tenant)
        if found.status in _OVER:
            raise LifecycleError(
                f"batch {batch_id} is {found.status.value}: nothing of it can be cancelled"
            )
        return found
