"""Batches, as those who make them see them."""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.batch_records import Batch, NewBatch, batch_id_of, job_id_of
from nightjar.jobs.errors import LifecycleError, ReusedKeyError, UnknownBatchError
from nightjar.jobs.states import BatchStage, BatchStatus, JobState
from nightjar.jobs.store.batch_rows import WITH_JOB, batch_record, find_batch
from nightjar.jobs.store.batch_tables import batch
from nightjar.jobs.store.common import OPEN_JOBS, now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.files import Files
from nightjar.jobs.store.idempotency import stored_key
from nightjar.jobs.store.json_text import dump_json
from nightjar.jobs.store.submission import new_parted_job_id
from nightjar.jobs.store.tables import job

_OVER = frozenset(
    {BatchStatus.FAILED, BatchStatus.FINALIZING, BatchStatus.COMPLETED, BatchStatus.EXPIRED}
)
_OF_KEY = sa.select(
    batch.c.job_id, batch.c.submission_digest, batch.c.input_file_id, batch.c.input_digest
).where(batch.c.idempotency_key == sa.bindparam("key"))


class Batches:
    """Makes batches, reads and cancels them; each tenant sees its own."""

    def __init__(self, database: Database, files: Files) -> None:
        self._database = database
        self._files = files

    def made_by(self, new: NewBatch) -> Batch | None:
        """The batch that the idempotency key has made; None without a key, or for a new one.

        Raises:
            ReusedKeyError: The key made a batch of other content. Files with the same bytes are
                the same content.
            UnknownFileError: The tenant has no such file, and the key's batch has another one.
        """
        if new.idempotency_key is None:
            return None
        with self._database.reading() as connection:
            return self._made_by(connection, new)

    def _made_by(self, connection: Connection, new: NewBatch) -> Batch | None:
        key = stored_key(new.tenant, new.idempotency_key)
        row = connection.execute(_OF_KEY, {"key": key}).one_or_none()
        if row is None:
            return None
        is_same = row.submission_digest == new.digest
        if is_same and row.input_file_id != new.input_file_id:
            file = self._files.find(connection, new.input_file_id, new.tenant)
            is_same = file.sha256 == row.input_digest
        if not is_same:
            raise ReusedKeyError(batch_id_of(row.job_id), "batch")
        return find_batch(connection, batch_id_of(row.job_id), new.tenant)

    def create(self, new: NewBatch) -> Batch:
        """Make a batch whose file is still to be read, or give the one of its idempotency key.

        Raises:
            UnknownFileError: The tenant has no such file.
            ReusedKeyError: See `made_by`.
        """
        values = {
            "job_id": new_parted_job_id(),
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
            "waits_for_model": new.waits_for_model,
            "idempotency_key": stored_key(new.tenant, new.idempotency_key),
            "submission_digest": new.digest,
        }

        def work(connection: Connection) -> Batch:
            # Locked: nobody can delete the file between this look and the batch that holds it.
            file = self._files.find(connection, new.input_file_id, new.tenant, lock=True)
            insert = self._database.insert(batch).values(**values, input_digest=file.sha256)
            inserted = insert.on_conflict_do_nothing().returning(batch.c.job_id)
            is_new = connection.execute(inserted).one_or_none() is not None
            if not is_new and (made := self._made_by(connection, new)) is not None:
                return made  # another call with the key came first
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
