"""Rows of the table of jobs as records."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from nightjar.jobs.errors import UnknownJobError
from nightjar.jobs.records import Job
from nightjar.jobs.store.json_text import load_json
from nightjar.jobs.store.tables import job

JOB_COLUMNS = [job.c[name] for name in Job.__slots__]
_FIND = sa.select(*JOB_COLUMNS).where(job.c.id == sa.bindparam("of_id"))  # clients poll it


def find_job(connection: Connection, job_id: str) -> Job:
    """The job of this id; raises UnknownJobError."""
    row = connection.execute(_FIND, {"of_id": job_id}).one_or_none()
    if row is None:
        raise UnknownJobError(job_id)
    return job_record(row)


def job_record(row: Row[Any]) -> Job:
    """The job of a row of JOB_COLUMNS."""
    return job_of(dict(row._mapping))


def job_of(values: Mapping[str, Any]) -> Job:
    """The job of these columns' values."""
    return Job(**{**values, "metadata": load_json(values["metadata"])})
