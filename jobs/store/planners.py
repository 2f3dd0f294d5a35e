"""Planners: their signs of life, and the ranges of rows that each plans.

A range keeps other planners from encoding the same rows. It is no lock: the store takes each
request into one plan only, whoever plans it.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.records import PlanningRange
from nightjar.jobs.store.awaiting import first_waiting
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.tables import job, planner, planning_range

_range = planning_range.c
_LOCK_JOB = sa.select(job.c.id).where(job.c.id == sa.bindparam("of_job")).with_for_update()
_OF_JOB = (
    sa.select(_range.first, _range.end)
    .where(_range.job_id == sa.bindparam("of_job"))
    .order_by(_range.first)
)
_COUNT_FAILURE = (
    sa.update(job)
    .where(job.c.id == sa.bindparam("of_job"))
    .values(plan_failures=job.c.plan_failures + 1)
)


class Planners:
    """Which planners live, and what each plans now."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def beat(self, owner: str, plans_with: str) -> None:
        """Raise a planner's counter, as a sign that it lives.

        `plans_with` says what its plans follow from: planners that say the same plan alike.
        """
        fresh = self._database.insert(planner).values(owner=owner, counter=1, plans_with=plans_with)
        statement = fresh.on_conflict_do_update(
            index_elements=[planner.c.owner],
            set_={"counter": planner.c.counter + 1, "plans_with": fresh.excluded.plans_with},
        )
        self._database.write(lambda connection: connection.execute(statement), durable=False)

    def all(self) -> Sequence[tuple[str, int]]:
        """Every planner's name and counter; 0 of one that was dropped and has taken rows since."""
        known = sa.select(planner.c.owner, planner.c.counter)
        unknown = sa.select(_range.owner, sa.literal(0)).where(
            ~sa.exists().where(planner.c.owner == _range.owner)
        )
        with self._database.reading() as connection:
            return [(owner, counter) for owner, counter in connection.execute(known.union(unknown))]

    def plans_with(self, owner: str) -> str | None:
        """What a planner's plans follow from; None if it has not said so."""
        statement = sa.select(planner.c.plans_with).where(planner.c.owner == owner)
        with self._database.reading() as connection:
            return connection.scalar(statement)

    def take(
        self, job_id: str, owner: str, most: int, *, count_failure: bool = True
    ) -> PlanningRange | None:
        """Take the first rows that wait and that nobody plans; None if there are none.

        The range spans `most` rows of the job, or ends where another planner's begins. If it is
        the lowest, a failure of the job is counted, which `save_plan` takes back. So a planner
        that dies of a job has counted it.
        """

        def work(connection: Connection) -> PlanningRange | None:
            key = {"of_job": job_id}
            # Two planners that choose at once would choose the same rows.
            if connection.scalar(_LOCK_JOB, key) is None:
                return None
            taken = [(row.first, row.end) for row in connection.execute(_OF_JOB, key)]
            found = _first_free(connection, job_id, taken, most)
            if found is None:
                return None
            values = {"job_id": job_id, "first": found.first, "end": found.end, "owner": owner}
            connection.execute(sa.insert(planning_range), values)
            if found.is_lowest and count_failure:
                connection.execute(_COUNT_FAILURE, key)
            return found

        # Not durable: after a crash of the database its planners begin anew.
        return self._database.write(work, durable=False)

    def narrow(self, owner: str, rows: PlanningRange, end: int) -> None:
        """Let a range end before this row, so that others may plan the rows from it on."""
        own = (_range.job_id == rows.job_id, _range.first == rows.first, _range.owner == owner)
        statement = sa.update(planning_range).where(*own).values(end=end)
        self._database.write(lambda connection: connection.execute(statement), durable=False)

    def release(self, owner: str) -> None:
        """Give back what a planner has taken: whatever still waits of it is free."""
        statement = sa.delete(planning_range).where(_range.owner == owner)
        self._database.write(lambda connection: connection.execute(statement), durable=False)

    def leave(self, owner: str) -> None:
        """Forget a planner that ends in order, and what it has taken."""

        def work(connection: Connection) -> None:
            connection.execute(sa.delete(planning_range).where(_range.owner == owner))
            connection.execute(sa.delete(planner).where(planner.c.owner == owner))

        self._database.write(work)

    def drop(self, owner: str, counter: int) -> int:
        """Forget a planner whose counter has not moved; returns how many ranges it gives back."""
        counted = sa.select(planner.c.counter).where(planner.c.owner == owner).with_for_update()

        def work(connection: Connection) -> int:
            if connection.scalar(counted) not in (counter, None):
                return 0
            connection.execute(sa.delete(planner).where(planner.c.owner == owner))
            return connection.execute(
                sa.delete(planning_range).where(_range.owner == owner)
            ).rowcount

        return self._database.write(work)


def _first_free(
    connection: Connection, job_id: str, taken: Sequence[tuple[int, int]], most: int
) -> PlanningRange | None:
    """The first waiting row outside of the taken ranges, which are in order, and those after it."""
    at, skipped = 0, False
    while True:
        first = first_waiting(connection, job_id, at)
        if first is None:
            return None
        inside = next((end for begin, end in taken if begin <= first < end), None)
        if inside is None:
            break
        at, skipped = inside, True
    end = min([first + most, *(begin for begin, _ in taken if begin > first)])
    return PlanningRange(job_id, first, end, is_lowest=not skipped)
