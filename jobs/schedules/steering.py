"""What people do with schedules, by the commands and by the API: one way for both.

Each change is recorded with its actor, in the transaction that makes it. `named` is the name of a
schedule or its id.
"""

from dataclasses import dataclass
from typing import Literal

from nightjar.jobs.errors import UnknownScheduleError
from nightjar.jobs.schedule_records import Definition, NewSchedule, Schedule, ScheduleRun
from nightjar.jobs.schedules.fields import check_name
from nightjar.jobs.schedules.times import next_of
from nightjar.jobs.store import Store

Change = Literal["created", "updated", "unchanged"]


@dataclass(frozen=True, slots=True)
class Put:
    """A schedule as it is now, and what was done to it."""

    schedule: Schedule
    change: Change


class Steering:
    """Makes, changes, pauses and runs the schedules of one tenant.

    Args:
        store: Where they are.
        tenant: Whose they are.
        actor: Who does it, for the record of changes.
    """

    def __init__(self, store: Store, tenant: str, actor: str) -> None:
        self._store = store
        self._tenant = tenant
        self._actor = actor

    def find(self, named: str) -> Schedule:
        """The schedule; raises UnknownScheduleError."""
        return self._store.schedules.find(self._tenant, named)

    def put(self, named: str, definition: Definition, source: str | None = None) -> Put:
        """Make a schedule, or make the one that is there say this.

        `source` is the schedule file that says so; None leaves it as it is.

        Raises:
            ScheduleError: The definition never comes, or its time zone is not known.
            ValueError: No new schedule can have this name.
            DuplicateScheduleError: Somebody else has made it at this very moment.
            TooManySchedulesError: The tenant has as many as it may have.
        """
        try:
            seen = self.find(named)
        except UnknownScheduleError:
            check_name(named)
            new = NewSchedule(named, definition, self._tenant, source)
            next_at = next_of(definition, self._store.schedule_runs.clock())
            return Put(self._store.schedules.create(new, self._actor, next_at), "created")
        change: Change = "unchanged" if seen.definition == definition else "updated"
        return Put(self.change(seen, definition, source), change)

    def change(self, seen: Schedule, definition: Definition, source: str | None = None) -> Schedule:
        """Make a schedule say this; without a difference, nothing is recorded."""
        next_at = next_of(definition, self._store.schedule_runs.clock())
        return self._store.schedules.update(seen, definition, self._actor, next_at, source=source)

    def pause(self, named: str) -> Schedule:
        """Make no more runs of a schedule; one that has begun goes on."""
        found = self.find(named)
        return self._store.schedules.set_paused(
            self._tenant, found.id, self._actor, None, paused=True
        )

    def resume(self, named: str) -> Schedule:
        """Let a paused schedule run again, from its next time on."""
        found = self.find(named)
        next_at = next_of(found.definition, self._store.schedule_runs.clock())
        return self._store.schedules.set_paused(
            self._tenant, found.id, self._actor, next_at, paused=False
        )

    def run_now(self, named: str) -> ScheduleRun:
        """Make a run that begins at once; raises LifecycleError where an earlier one goes on."""
        found = self.find(named)
        moment = self._store.schedule_runs.clock()
        return self._store.schedule_runs.run_now(self._tenant, found.id, self._actor, moment)

    def delete(self, named: str) -> Schedule:
        """Delete a schedule with its history, and cancel what it runs; returns what it was."""
        found = self.find(named)
        self._store.schedules.delete(self._tenant, found.id, self._actor)
        return found
