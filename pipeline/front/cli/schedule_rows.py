"""Schedules and their runs as rows of plain values, for the commands to print."""

from datetime import datetime
from typing import Any

from nightjar.jobs.schedule_records import Schedule, ScheduleOverview, ScheduleRun
from nightjar.jobs.schedules.times import ScheduleError, zone_of
from nightjar.pipeline.front.cli.stored import shown


def listed_row(one: ScheduleOverview) -> dict[str, Any]:
    """A schedule with the planned time, state and reason of its newest run."""
    last = one.last_run
    return schedule_row(one.schedule) | {
        "last_planned_at": None if last is None else shown(last.planned_at),
        "last_state": None if last is None else last.state.value,
        "last_reason": None if last is None else last.reason,
    }


def schedule_row(found: Schedule) -> dict[str, Any]:
    """A schedule; its next time is on the clock of its time zone."""
    definition = found.definition.values()
    return {
        "id": found.id,
        "name": found.name,
        **definition,
        "paused": found.paused,
        "next_at": shown(_local(found.next_at, found)),
        "failures": found.failures,
        "source": found.source,
        "created_at": shown(found.created_at),
        "changed_at": shown(found.changed_at),
    }


def _local(moment: datetime | None, of: Schedule) -> datetime | None:
    try:
        return None if moment is None else moment.astimezone(zone_of(of.definition.time_zone))
    except ScheduleError:
        return moment


def run_row(run: ScheduleRun) -> dict[str, Any]:
    """A run; its times are in UTC."""
    return {
        "id": run.id,
        "planned_at": shown(run.planned_at),
        "begin_at": shown(run.begin_at),
        "deadline_at": shown(run.deadline_at),
        "trigger": run.trigger.value,
        "state": run.state.value,
        "missed": run.missed,
        "attempts": run.attempts,
        "reason": run.reason,
        "job_id": run.job_id,
        "total": run.total,
        "completed": run.completed,
        "failed": run.failed,
        "started_at": shown(run.started_at),
        "ended_at": shown(run.ended_at),
    }
