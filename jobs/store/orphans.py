"""Followers that their leader's end has left behind.

Whoever ends a leader ends its followers with it; a worker of the version before does not know of
them. They are found where nothing else of the job is under way.
"""

from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.records import JobState, MicroBatchState
from nightjar.jobs.store.base import AWAITS_PLAN, OPEN_JOBS, StorePart, has_rows
from nightjar.jobs.store.following import IS_FOLLOWING
from nightjar.jobs.store.tables import job, micro_batch, request

LEADERS_PER_STEP = 100

_UNDER_WAY = [MicroBatchState.READY, MicroBatchState.DISPATCHED, MicroBatchState.LEASED]
_of_job = request.c.job_id == job.c.id
_WAITING_FOR_NOTHING = sa.select(job.c.id).where(
    job.c.state.in_([*OPEN_JOBS, JobState.CANCELLING]),
    has_rows(request.c.leader_id, _of_job, IS_FOLLOWING),
    ~has_rows(request.c.row_index, _of_job, AWAITS_PLAN),
    *(
        ~has_rows(micro_batch.c.id, micro_batch.c.job_id == job.c.id, micro_batch.c.state == state)
        for state in _UNDER_WAY
    ),
)
_LEADERS = (
    sa.select(request.c.leader_id)
    .where(request.c.job_id == sa.bindparam("job"), IS_FOLLOWING)
    .distinct()
    .limit(LEADERS_PER_STEP)
)


class OrphanStore(StorePart):
    """What the sweeper asks for."""

    def land_orphans(self) -> int:
        """Give followers whose leaders have ended without them the same end; returns how many."""
        with self._database.reading() as connection:
            jobs = list(connection.scalars(_WAITING_FOR_NOTHING))
        landed = 0
        for job_id in jobs:
            while step := self._database.write(partial(self._land_some, job_id=job_id)):
                landed += step
        return landed

    def _land_some(self, connection: Connection, job_id: str) -> int:
        leaders = list(connection.scalars(_LEADERS, {"job": job_id}))
        return self._land_followers(connection, job_id, leaders)
