"""What the API says of schedules, as JSON; `schedule_schemas.py` has the types."""

from typing import cast

from nightjar.jobs.api.payloads import seconds, seconds_or_none
from nightjar.jobs.api.schedule_schemas import (
    ScheduleChangePayload,
    SchedulePayload,
    ScheduleRunPayload,
    ShownFields,
)
from nightjar.jobs.schedule_records import Schedule, ScheduleChange, ScheduleRun
from nightjar.jobs.schedules.fields import shown_fields


def schedule_payload(found: Schedule, last_run: ScheduleRun | None) -> SchedulePayload:
    """A schedule, with its newest run."""
    shown = cast(ShownFields, shown_fields(found.definition.values()))
    return {
        "id": found.id,
        "object": "schedule",
        "name": found.name,
        **shown,
        "paused": found.paused,
        "failing": found.is_failing,
        "failures": found.failures,
        "next_at": seconds_or_none(found.next_at),
        "last_run": None if last_run is None else run_payload(last_run),
        "created_at": seconds(found.created_at),
        "changed_at": seconds(found.changed_at),
    }


def run_payload(run: ScheduleRun) -> ScheduleRunPayload:
    """A run of a schedule."""
    return {
        "id": run.id,
        "object": "schedule.run",
        "schedule_id": run.schedule_id,
        "planned_at": seconds(run.planned_at),
        "begin_at": seconds(run.begin_at),
        "deadline_at": seconds(run.deadline_at),
        "trigger": run.trigger,
        "state": run.state,
        "missed": run.missed,
        "attempts": run.attempts,
        "reason": run.reason,
        "job_id": run.job_id,
        "counts": {"total": run.total, "completed": run.completed, "failed": run.failed},
        "created_at": seconds(run.created_at),
        "started_at": seconds_or_none(run.started_at),
        "ended_at": seconds_or_none(run.ended_at),
    }


def change_payload(change: ScheduleChange) -> ScheduleChangePayload:
    """A change of a schedule."""
    return {
        "id": change.id,
        "object": "schedule.change",
        "schedule_id": change.schedule_id,
        "name": change.name,
        "at": seconds(change.at),
        "actor": change.actor,
        "action": change.action,
        "before": shown_fields(change.before),
        "after": shown_fields(change.after),
    }
