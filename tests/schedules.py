"""Schedules in a real store, a planner's pass over them, and a clock that a test moves."""

from datetime import UTC, datetime, timedelta
from typing import Any

from nightjar.jobs.schedule_records import (
    Definition,
    NewSchedule,
    RunState,
    Schedule,
    ScheduleRun,
)
from nightjar.jobs.schedules.times import Timetable
from nightjar.jobs.store import Store
from nightjar.pipeline.queue.scheduling import Scheduling

NIGHTLY = "0 2 * * *"
NOON = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
FIRST = datetime(2026, 11, 24, 2, 0, tzinfo=UTC)
DAY = timedelta(days=1)
MINUTE = timedelta(minutes=1)


class Clock:
    """A wall clock that a test sets, and a monotonic one beside it that never goes back."""

    def __init__(self, moment: datetime = NOON) -> None:
        self.moment = moment
        self.seconds = 0.0

    def now(self) -> datetime:
        """The moment that the wall clock shows."""
        return self.moment

    def monotonic(self) -> float:
        """Seconds; each look is another minute later, so that every rare check is made."""
        self.seconds += 61.0
        return self.seconds


def planner(store: Store, clock: Clock, *, keep_days: float = 90.0) -> Scheduling:
    """A planner's pass with that clock."""
    return Scheduling(
        store, keep_days=keep_days, idle_s=1.0, clock=clock.now, monotonic=clock.monotonic
    )


def add_schedule(
    store: Store,
    clock: Clock,
    name: str = "nightly",
    *,
    tenant: str = "default",
    **given: Any,
) -> Schedule:
    """Store a schedule of a task, nightly at two unless the fields say otherwise."""
    fields: dict[str, Any] = {"cron": NIGHTLY}
    if "file_id" not in given:
        fields["task_path"] = "/tasks/rank.toml"
    definition = Definition(**{**fields, **given})
    next_at = Timetable(definition.cron, definition.time_zone).after(clock.now())
    return store.schedules.create(NewSchedule(name, definition, tenant), "test", next_at)


def runs_of(store: Store, schedule: Schedule) -> list[ScheduleRun]:
    """Its runs, the oldest first."""
    return store.schedule_runs.newest(schedule.id, 1_000)[::-1]


def states(store: Store, schedule: Schedule) -> list[RunState]:
    """The states of its runs, the oldest first."""
    return [run.state for run in runs_of(store, schedule)]
