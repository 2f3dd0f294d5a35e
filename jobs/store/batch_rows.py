"""Rows of the table of batches as records, each with its job."""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from nightjar.jobs.batch_records import Batch, job_id_of
from nightjar.jobs.errors import UnknownBatchError
from nightjar.jobs.states import BatchStage
from nightjar.jobs.store.batch_tables import batch
from nightjar.jobs.store.job_rows import JOB_COLUMNS, job_of
from nightjar.jobs.store.json_text import load_json
from nightjar.jobs.store.tables import job

_COLUMNS = [batch.c[name] for name in Batch.__slots__ if name != "job"]
# Of one statement, so that both tables are seen at one moment.
WITH_JOB = sa.select(
    *_COLUMNS, *(column.label(f"job.{column.name}") for column in JOB_COLUMNS)
).select_from(batch.outerjoin(job, job.c.id == batch.c.job_id))
# Built once, as clients poll it: building it took longer than running it.
_FIND = WITH_JOB.where(
    batch.c.job_id == sa.bindparam("of_job"), batch.c.tenant == sa.bindparam("of_tenant")
)


def find_batch(connection: Connection, batch_id: str, tenant: str) -> Batch:
    """The tenant's batch of this id; raises UnknownBatchError."""
    job_id = job_id_of(batch_id)
    row = None
    if job_id is not None:
        row = connection.execute(_FIND, {"of_job": job_id, "of_tenant": tenant}).one_or_none()
    if row is None:
        raise UnknownBatchError(batch_id)
    return batch_record(row)


def batch_record(row: Row[Any]) -> Batch:
    """The batch of a row of WITH_JOB."""
    values, of_job = {}, {}
    for name, value in row._mapping.items():
        if name.startswith("job."):
            of_job[name.removeprefix("job.")] = value
        else:
            values[name] = value
    values["metadata"] = load_json(values["metadata"])
    errors = values["errors"]
    values["errors"] = () if errors is None else tuple(load_json(errors)["data"])
    return Batch(**values, job=None if of_job["id"] is None else job_of(of_job))


def holds_file(connection: Connection, file_id: str) -> bool:
    """Whether a batch that is being validated reads the file."""
    reads = (batch.c.stage == BatchStage.VALIDATING, batch.c.input_file_id == file_id)
    return connection.scalar(sa.select(batch.c.job_id).where(*reads).limit(1)) is not None
