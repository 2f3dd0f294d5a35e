"""What statements about schedules have in common: records of rows, new runs, ends of runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import UnknownScheduleError
from nightjar.jobs.events import EventCounts, EventType, new_id
from nightjar.jobs.schedule_records import (
    FAILING_AFTER,
    ChangeAction,
    Definition,
    RunEnd,
    RunState,
    Schedule,
    ScheduleRun,
    Trigger,
    WhenRunning,
)
from nightjar.jobs.store.announcing import announce
from nightjar.jobs.store.common import AnyRow
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.schedule_tables import schedule, schedule_change, schedule_run

run = schedule_run.c
DEFINED = [schedule.c[field.name] for field in fields(Definition)]
RUN_FIELDS = [run[field.name] for field in fields(ScheduleRun)]
# Repeats the condition of the partial index.
IS_OPEN = run.ended_at.is_(None)
STOPPABLE = (RunState.WAITING, RunState.READING, RunState.COMPUTING)


def definition_of(row: AnyRow) -> Definition:
    """The definition in a row that has the columns of DEFINED."""
    return Definition(**{column.name: row._mapping[column] for column in DEFINED})


def schedule_record(row: AnyRow) -> Schedule:
    """A row of the table `schedule`, whole."""
    found = row._mapping
    plain = [field.name for field in fields(Schedule) if field.name != "definition"]
    values: dict[str, Any] = {name: found[schedule.c[name]] for name in plain}
    return Schedule(**values, definition=definition_of(row))


def run_record(row: AnyRow) -> ScheduleRun:
    """The run in a row that has the columns of RUN_FIELDS."""
    return ScheduleRun(**{column.name: row._mapping[column] for column in RUN_FIELDS})


def locked_schedule(connection: Connection, tenant: str, schedule_id: str) -> Schedule:
    """A tenant's schedule that nobody else changes until the transaction ends.

    Raises:
        UnknownScheduleError: The tenant has none with this id.
    """
    owned = (schedule.c.id == schedule_id, schedule.c.tenant == tenant)
    row = connection.execute(sa.select(schedule).where(*owned).with_for_update()).one_or_none()
    if row is None:
        raise UnknownScheduleError(schedule_id)
    return schedule_record(row)


def note_change(
    connection: Connection,
    changed: Schedule,
    action: ChangeAction,
    actor: str,
    moment: datetime,
    *,
    before: Mapping[str, object] | None = None,
    after: Mapping[str, object] | None = None,
) -> None:
    """Record who changed a schedule, and the fields that differ."""
    old, new = before or {}, after or {}
    differ = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    values = {
        "id": new_id("chg"),
        "schedule_id": changed.id,
        "tenant": changed.tenant,
        "name": changed.name,
        "at": moment,
        "actor": actor[:255],
        "action": action,
        "before": json.dumps({name: old[name] for name in differ if name in old}),
        "after": json.dumps({name: new[name] for name in differ if name in new}),
    }
    connection.execute(sa.insert(schedule_change).values(values))


def add_run(  # noqa: PLR0913 - what a run consists of
    database: Database,
    connection: Connection,
    of: Schedule,
    planned_at: datetime,
    trigger: Trigger,
    moment: datetime,
    *,
    missed: int = 0,
    jitter_s: float = 0.0,
    skip_reason: str | None = None,
) -> ScheduleRun | None:
    """Add the run of a planned time; None if that time has one already.

    The caller holds the schedule's lock. What happens to an earlier run that goes on is decided
    here, so that each planned time is decided once.
    """
    begin_at = planned_at + timedelta(seconds=jitter_s)
    values: dict[str, Any] = {
        "id": new_id("run"),
        "schedule_id": of.id,
        "tenant": of.tenant,
        "planned_at": planned_at,
        "begin_at": begin_at,
        # A run that is caught up has as much time as any other.
        "deadline_at": max(begin_at, moment) + timedelta(seconds=of.definition.deadline_s),
        "trigger": trigger,
        "state": RunState.WAITING,
        "missed": missed,
        "created_at": moment,
        "cancels_job": False,
        **dict.fromkeys(("attempts", "epoch", "beats", "total", "completed", "failed"), 0),
    }
    earlier = connection.execute(
        sa.select(run.id, run.state, run.planned_at)
        .where(run.schedule_id == of.id, IS_OPEN, run.planned_at != planned_at)
        .order_by(run.id)
    ).all()
    skip_reason = skip_reason or still_running(of.definition.when_still_running, earlier)
    if skip_reason is not None:
        values |= {"state": RunState.SKIPPED, "reason": skip_reason, "ended_at": moment}
    insert = database.insert(schedule_run).values(values)
    added = insert.on_conflict_do_nothing(index_elements=[run.schedule_id, run.planned_at])
    row = connection.execute(added.returning(*RUN_FIELDS)).one_or_none()
    if row is None:
        return None
    if of.definition.when_still_running is WhenRunning.CANCEL and skip_reason is None:
        _cancel(connection, [one.id for one in earlier], planned_at, moment)
    return run_record(row)


def still_running(rule: WhenRunning, earlier: Sequence[AnyRow]) -> str | None:
    """Why a new run is left out while these runs of its schedule go on; None if it is not."""
    if not earlier or rule is WhenRunning.CANCEL:
        return None
    if rule is WhenRunning.QUEUE and len(earlier) == 1:
        return None
    first = earlier[0]
    told = f"the run planned at {first.planned_at.isoformat(timespec='seconds')}"
    if rule is WhenRunning.QUEUE:
        return f"a run waits already, behind {told}"
    return f"{told} goes on ({first.state.value})"


def _cancel(
    connection: Connection, run_ids: list[str], planned_at: datetime, moment: datetime
) -> None:
    """Cancel runs for the sake of a later one; a run that writes its answers is let alone."""
    reason = f"the run planned at {planned_at.isoformat(timespec='seconds')} has replaced it"
    connection.execute(
        sa.update(schedule_run)
        .where(run.id.in_(run_ids), run.state.in_(STOPPABLE))
        .values(
            state=RunState.CANCELLED,
            reason=reason,
            ended_at=moment,
            cancels_job=run.job_id.is_not(None),
            epoch=run.epoch + 1,
            owner=None,
        )
    )


def end_run(
    connection: Connection,
    run_id: str,
    end: RunEnd,
    moment: datetime,
    *where: sa.ColumnElement[bool],
) -> bool:
    """End a run that is open and meets the conditions; whether it was.

    The third failure in a row is announced to the tenant's webhooks, in the same transaction.
    """
    of_run = sa.select(run.schedule_id).where(run.id == run_id).scalar_subquery()
    # The schedule before the run, as everywhere: so nobody waits in a circle.
    locked = sa.select(schedule.c.id).where(schedule.c.id == of_run).with_for_update()
    schedule_id = connection.scalar(locked)
    failed = end.state is RunState.FAILED
    ended = connection.execute(
        sa.update(schedule_run)
        .where(run.id == run_id, IS_OPEN, *where)
        .values(
            state=end.state,
            reason=end.reason,
            total=end.total,
            completed=end.completed,
            failed=end.failed,
            ended_at=moment,
            owner=None,
            cancels_job=sa.and_(run.job_id.is_not(None), sa.literal(failed)),
        )
        .returning(run.tenant, run.job_id)
    ).one_or_none()
    if ended is None:
        return False
    if not failed and end.state is not RunState.SUCCEEDED:
        return True
    failures = schedule.c.failures + 1 if failed else sa.literal(0)
    counted = sa.update(schedule).where(schedule.c.id == schedule_id).values(failures=failures)
    in_a_row = connection.scalar(counted.returning(schedule.c.failures))
    if in_a_row == FAILING_AFTER and schedule_id is not None:
        _announce(connection, ended, schedule_id, end)
    return True


def _announce(connection: Connection, ended: AnyRow, schedule_id: str, end: RunEnd) -> None:
    counts: EventCounts = {
        "total": end.total,
        "completed": end.completed,
        "failed": end.failed,
        "cancelled": end.total - end.completed - end.failed,
    }
    about = ended.job_id or schedule_id
    announce(connection, ended.tenant, EventType.SCHEDULE_FAILING, about, schedule_id, counts)
