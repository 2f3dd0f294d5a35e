"""Orphans: followers whose leader has ended without them.

Whoever ends a leader ends its followers in the same transaction, or, if they are many, in the next
ones. A process may die in between. Its orphans are found in jobs of which nothing else is under
way.
"""

import math
import time
from functools import partial

import sqlalchemy as sa

from nightjar.jobs.states import JobState
from nightjar.jobs.store.awaiting import HAS_UNPLANNED, UNDER_WAY
from nightjar.jobs.store.common import OPEN_JOBS, has_rows
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.following import IS_FOLLOWING
from nightjar.jobs.store.outcomes import Outcomes
from nightjar.jobs.store.parts import InPartOf
from nightjar.jobs.store.tables import job, micro_batch, request
from nightjar.jobs.store.turns import Turns

_of_job = request.c.job_id == job.c.id
_in_part = InPartOf(request.c.id, job.c.id)
_WAITING_FOR_NOTHING = sa.select(job.c.id).where(
    job.c.state.in_([*OPEN_JOBS, JobState.CANCELLING]),
    has_rows(request.c.leader_id, _of_job, _in_part, IS_FOLLOWING),
    ~HAS_UNPLANNED,
    *(
        ~has_rows(micro_batch.c.id, micro_batch.c.job_id == job.c.id, micro_batch.c.state == state)
        for state in UNDER_WAY
    ),
)


class Orphans:
    """Followers whose leader has ended without them."""

    def __init__(self, database: Database, outcomes: Outcomes) -> None:
        self._database = database
        self._outcomes = outcomes

    def land(self, patience_s: float = math.inf) -> int:
        """Give orphans the end of their leaders; returns how many landed.

        No step begins after `patience_s` seconds; the next call goes on with the rest.
        """
        deadline = time.monotonic() + patience_s
        with self._database.reading() as connection:
            jobs = list(connection.scalars(_WAITING_FOR_NOTHING))
        turns = Turns(self._database)
        landed = 0
        for job_id in jobs:
            while step := self._database.write(partial(self._outcomes.land_some, job_id=job_id)):
                landed += step
                if time.monotonic() >= deadline:
                    return landed
                turns.give()
        return landed
