"""Tells what is wrong with schedules, for `nightjar schedules check` and the API."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from nightjar.jobs.schedule_records import (
    FAILING_AFTER,
    LATE_S,
    RunState,
    Schedule,
    ScheduleOverview,
    ScheduleRun,
)
from nightjar.jobs.store import Store

_LATE = timedelta(seconds=LATE_S)
_PAGE = 100
_MOST_OPEN_RUNS = 10_000


@dataclass(frozen=True, slots=True)
class Trouble:
    """A schedule that fails or stands still, and what is wrong with it."""

    schedule: Schedule
    told: str


def troubles(store: Store, tenant: str | None) -> list[Trouble]:
    """Every schedule with a trouble; of all tenants if `tenant` is None."""
    moment = store.schedule_runs.clock()
    first: dict[str, ScheduleRun] = {}
    for run in store.schedule_runs.open_runs(_MOST_OPEN_RUNS):
        first.setdefault(run.schedule_id, run)
    return [
        Trouble(one.schedule, told)
        for one in each_schedule(store, tenant)
        if (told := trouble_of(one, first.get(one.schedule.id), moment)) is not None
    ]


def each_schedule(store: Store, tenant: str | None) -> Iterator[ScheduleOverview]:
    """Schedules with their newest runs, read in pages, newest first."""
    after = None
    while page := store.schedules.overview(tenant, _PAGE, after):
        yield from page
        after = page[-1].schedule.id


def trouble_of(
    found: ScheduleOverview, open_run: ScheduleRun | None, moment: datetime
) -> str | None:
    """What is wrong with a schedule; None if nothing is.

    open_run: Its run that goes on, if there is one.
    """
    schedule, last = found.schedule, found.last_run
    if schedule.is_failing:
        told = "" if last is None or last.reason is None else f"; the last: {last.reason}"
        return f"its last {schedule.failures} runs have failed (from {FAILING_AFTER} on){told}"
    if not schedule.paused and schedule.next_at is not None and moment - schedule.next_at > _LATE:
        return f"its time came at {_shown(schedule.next_at)}, and no planner has seen it"
    if (
        open_run is not None
        and open_run.state is RunState.WAITING
        and schedule.definition.file_id is None
        and moment - open_run.begin_at > _LATE
    ):
        return (
            f"the run of {_shown(open_run.planned_at)} waits, and no `nightjar worker tasks` takes "
            "it"
        )
    return None


def _shown(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds")
