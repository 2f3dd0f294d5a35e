"""Reading: what became of a job, in pages that never skip and never repeat."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from nightjar.jobs.errors import UnknownJobError
from nightjar.jobs.records import Job, MicroBatchState, ResultRecord, WorkerHeartbeat
from nightjar.jobs.store.base import StorePart, load_json, now
from nightjar.jobs.store.paging import PAGE_BYTES, Outcome, fetch, fitting, sizes_after
from nightjar.jobs.store.tables import job, micro_batch, worker

ROWS_IN_MEMORY = 200
_JOB_COLUMNS = [job.c[name] for name in Job.__slots__]


class ReadingStore(StorePart):
    """What clients, the API and writers of files ask for."""

    def job(self, job_id: str) -> Job:
        """The job as it stands; raises UnknownJobError."""
        with self._database.reading() as connection:
            return find_job(connection, job_id)

    def jobs(self, limit: int = 20, after: str | None = None) -> list[Job]:
        """Jobs, newest first; `after` is the id of the last one of the page before."""
        statement = sa.select(*_JOB_COLUMNS).order_by(job.c.id.desc()).limit(limit)
        if after is not None:
            statement = statement.where(job.c.id < after)
        with self._database.reading() as connection:
            return [_job(row) for row in connection.execute(statement)]

    def results(
        self,
        job_id: str,
        *,
        after_index: int = -1,
        limit: int = 1_000,
        outcome: Outcome = "all",
        max_bytes: int = PAGE_BYTES,
    ) -> list[ResultRecord]:
        """Up to `limit` landed outcomes whose row index lies above `after_index`, in row order.

        Fewer, but at least one, where more would exceed `max_bytes`. Rows may land in any order:
        while the job runs, a row below `after_index` can still appear, and `results_page` is the
        one to ask. "failed" includes cancelled rows.
        """
        with self._database.snapshot() as connection:
            sizes = sizes_after(connection, self._database, job_id, after_index, limit, outcome)
            taken = fitting(sizes, limit, max_bytes)
            return fetch(connection, self._database, [row.request_id for row in taken])

    def iter_results(
        self, job_id: str, *, outcome: Outcome = "all", page_size: int = ROWS_IN_MEMORY
    ) -> Iterator[ResultRecord]:
        """Every landed outcome in row order, a page in memory at a time."""
        after_index = -1
        while page := self.results(
            job_id, after_index=after_index, limit=page_size, outcome=outcome
        ):
            yield from page
            after_index = page[-1].index

    def job_in_detail(self, job_id: str) -> tuple[Job, dict[MicroBatchState, int]]:
        """The job, and how many of its micro-batches are in each state; every state is there.

        What people poll: on one connection.  Raises UnknownJobError.
        """
        with self._database.reading() as connection:
            return find_job(connection, job_id), _micro_batches(connection, job_id)

    def worker_counters(self) -> list[WorkerHeartbeat]:
        """The counters of the GPU workers, without those that ended long ago."""
        recent = worker.c.seen_at > now() - timedelta(days=1)
        statement = sa.select(worker.c.owner, worker.c.counter).where(recent)
        with self._database.reading() as connection:
            return [WorkerHeartbeat(*row) for row in connection.execute(statement)]

    def ping(self) -> None:
        """Raise StoreError unless the database answers and has Nightjar's tables."""
        with self._database.reading(probe=True) as connection:
            connection.execute(sa.select(job.c.id).limit(1)).all()


def find_job(connection: Connection, job_id: str) -> Job:
    """The job of this id; raises UnknownJobError."""
    row = connection.execute(sa.select(*_JOB_COLUMNS).where(job.c.id == job_id)).one_or_none()
    if row is None:
        raise UnknownJobError(job_id)
    return _job(row)


def _micro_batches(connection: Connection, job_id: str) -> dict[MicroBatchState, int]:
    row = micro_batch.c
    statement = (
        sa.select(row.state, sa.func.count())
        # All states by name, so that the index on (state, job_id) serves the question.
        .where(row.job_id == job_id, row.state.in_(list(MicroBatchState)))
        .group_by(row.state)
    )
    counted: dict[MicroBatchState, int] = dict(connection.execute(statement).all())
    return {state: counted.get(state, 0) for state in MicroBatchState}


def _job(row: Row[Any]) -> Job:
    values = dict(row._mapping)
    values["metadata"] = load_json(values["metadata"])
    return Job(**values)
