"""Which trace a job belongs to."""

from collections.abc import Collection, Mapping

import sqlalchemy as sa

from nightjar.jobs.store.database import Database
from nightjar.jobs.store.tables import job

_OF_JOBS = sa.select(job.c.id, job.c.traceparent).where(
    job.c.id.in_(sa.bindparam("jobs", expanding=True)), job.c.traceparent.is_not(None)
)


class Traces:
    """Reads the traces of jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of_jobs(self, job_ids: Collection[str]) -> Mapping[str, str]:
        """Return the traceparent of each of these jobs that is traced."""
        if not job_ids:
            return {}
        with self._database.reading() as connection:
            rows = connection.execute(_OF_JOBS, {"jobs": sorted(set(job_ids))}).all()
        return {row.id: row.traceparent for row in rows}
