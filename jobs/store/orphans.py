"""Followers that their leader's end has left behind.

Whoever ends a leader ends its followers with it, or in the transactions right after, where they
are many. A process may die in between. The followers are found where nothing else of the job is
under way.
"""

import math
import time
from functools import partial

import sqlalchemy as sa

from nightjar.jobs.records import JobState, MicroBatchState
from nightjar.jobs.store.base import AWAITS_PLAN, OPEN_JOBS, StorePart, Turns, has_rows
from nightjar.jobs.store.following import IS_FOLLOWING
from nightjar.jobs.store.tables import job, micro_batch, request

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


class OrphanStore(StorePart):
    """What the sweeper asks for."""

    def land_orphans(self, patience_s: float = math.inf) -> int:
        """Give followers whose leaders have ended without them the same end; returns how many.

        No step begins after `patience_s` seconds; what is left then is for the next call.
        """
        deadline = time.monotonic() + patience_s
        with self._database.reading() as connection:
            jobs = list(connection.scalars(_WAITING_FOR_NOTHING))
        turns = Turns(self._database)
        landed = 0
        for job_id in jobs:
            while step := self._database.write(partial(self._land_some, job_id=job_id)):
                landed += step
                if time.monotonic() >= deadline:
                    return landed
                turns.give()
        return landed
