"""Tells what is wrong with a schedule, for `nightjar schedules check`."""

from datetime import datetime, timedelta

from nightjar.jobs.schedule_records import (
    FAILING_AFTER,
    LATE_S,
    RunState,
    ScheduleOverview,
    ScheduleRun,
)

_LATE = timedelta(seconds=LATE_S)


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
