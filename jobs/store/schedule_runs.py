"""Runs of schedules: planned times that have come, their history, their deadlines.

Each planned time has at most one run: a unique key says so. So it does not matter how many planners
find that a time has come, or whether a clock shows it twice.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import LifecycleError
from nightjar.jobs.events import oldest_id
from nightjar.jobs.schedule_records import (
    ChangeAction,
    Firing,
    RunEnd,
    RunState,
    Schedule,
    ScheduleRun,
    Trigger,
)
from nightjar.jobs.store.common import AnyRow
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.schedule_rows import (
    IS_OPEN,
    RUN_FIELDS,
    STOPPABLE,
    add_run,
    end_run,
    locked_schedule,
    note_change,
    run,
    run_record,
    schedule_record,
)
from nightjar.jobs.store.schedule_tables import schedule, schedule_change, schedule_run

PRUNED_PER_STEP = 1_000
_AWAKE = (sa.not_(schedule.c.paused), schedule.c.next_at.is_not(None))


class ScheduleRuns:
    """What the leading planner does with schedules, and the history of their runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def clock(self) -> datetime:
        """The time that decides what is due: PostgreSQL's own, with SQLite this machine's.

        So the planners of a deployment on PostgreSQL agree, whatever their own clocks show.
        """
        if self._database.is_sqlite:
            return datetime.now(UTC)
        with self._database.reading() as connection:
            found: datetime = connection.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
        return found.astimezone(UTC)

    def due(self, moment: datetime, limit: int) -> list[Schedule]:
        """Schedules whose next planned time has come, the earliest first."""
        found = sa.select(schedule).where(*_AWAKE, schedule.c.next_at <= moment)
        with self._database.reading() as connection:
            rows = connection.execute(found.order_by(schedule.c.next_at).limit(limit))
            return [schedule_record(row) for row in rows]

    def asleep(self, moment: datetime, limit: int, after: str = "") -> list[Schedule]:
        """Schedules that are not due, in the order of their ids, behind the id `after`."""
        found = sa.select(schedule).where(
            *_AWAKE, schedule.c.next_at > moment, schedule.c.id > after
        )
        with self._database.reading() as connection:
            rows = connection.execute(found.order_by(schedule.c.id).limit(limit))
            return [schedule_record(row) for row in rows]

    def move_next(self, seen: Schedule, next_at: datetime | None) -> bool:
        """Correct a schedule's next planned time; False if somebody has changed it since."""
        return self._database.write(lambda connection: _move(connection, seen, next_at))

    def fire(self, firing: Firing, moment: datetime) -> ScheduleRun | None:
        """Make the run of a planned time, and go on to the next; None if that was done already."""
        of = firing.schedule

        def work(connection: Connection) -> ScheduleRun | None:
            if not _move(connection, of, firing.next_at):
                return None
            return add_run(
                self._database,
                connection,
                of,
                firing.planned_at,
                firing.trigger,
                moment,
                missed=_missed(connection, firing),
                jitter_s=firing.jitter_s,
                skip_reason=firing.skip_reason,
            )

        return self._database.write(work)

    def run_now(self, tenant: str, schedule_id: str, actor: str, moment: datetime) -> ScheduleRun:
        """Make a run that begins at once, also of a schedule that is paused.

        Raises:
            UnknownScheduleError: The tenant has no such schedule.
            LifecycleError: An earlier run goes on, and the schedule would skip this one.
        """

        def work(connection: Connection) -> ScheduleRun:
            found = locked_schedule(connection, tenant, schedule_id)
            made = add_run(self._database, connection, found, moment, Trigger.MANUAL, moment)
            if made is None or made.state is RunState.SKIPPED:
                reason = "one of this very moment is there" if made is None else made.reason
                raise LifecycleError(f"the schedule {found.name!r} cannot run now: {reason}")
            note_change(connection, found, ChangeAction.RUN_NOW, actor, moment)
            return made

        return self._database.write(work)

    def newest(self, schedule_id: str, limit: int, after: str | None = None) -> list[ScheduleRun]:
        """Runs of a schedule, newest first; `after` is the last one of the page before."""
        found = sa.select(*RUN_FIELDS).where(run.schedule_id == schedule_id)
        if after is not None:
            found = found.where(run.id < after)
        with self._database.reading() as connection:
            rows = connection.execute(found.order_by(run.id.desc()).limit(limit))
            return [run_record(row) for row in rows]

    def open_runs(self, limit: int) -> list[ScheduleRun]:
        """Runs without an end, the oldest first."""
        found = sa.select(*RUN_FIELDS).where(IS_OPEN).order_by(run.begin_at).limit(limit)
        with self._database.reading() as connection:
            return [run_record(row) for row in connection.execute(found)]

    def end_overdue(self, moment: datetime, limit: int) -> list[str]:
        """Fail runs whose deadline has passed, but for those that write; returns their ids."""
        overdue = sa.select(run.id, run.state, run.reason).where(
            IS_OPEN, run.deadline_at <= moment, run.state.in_(STOPPABLE)
        )
        with self._database.reading() as connection:
            found = connection.execute(overdue.limit(limit)).all()
        return [one.id for one in found if self._end(one, moment)]

    def _end(self, overdue: AnyRow, moment: datetime) -> bool:
        told = f"; the last time: {overdue.reason}" if overdue.reason else ""
        if overdue.state is RunState.WAITING:
            told = told or "; no process has taken it, or an earlier run kept it waiting"
        reason = f"its deadline has passed while it was {overdue.state.value}{told}"
        end = RunEnd(RunState.FAILED, reason)
        same = run.state == overdue.state
        return self._database.write(partial(_end_open, overdue.id, end, moment, same))

    def jobs_to_cancel(self, limit: int) -> list[tuple[str, str]]:
        """Ids of runs that were ended, and of their jobs that may still go on."""
        found = sa.select(run.id, run.job_id).where(run.cancels_job).order_by(run.id).limit(limit)
        with self._database.reading() as connection:
            return [(row.id, row.job_id) for row in connection.execute(found)]

    def note_cancelled(self, run_ids: Sequence[str]) -> None:
        """Note that the jobs of these runs were told to end."""
        noted = sa.update(schedule_run).where(run.id.in_(run_ids)).values(cancels_job=False)
        self._database.write(lambda connection: connection.execute(noted))

    def prune(self, before: datetime, changes_before: datetime) -> int:
        """Delete some runs and changes that are older; returns how many."""
        old_run = oldest_id("run", int(before.timestamp() * 1_000))
        old_change = oldest_id("chg", int(changes_before.timestamp() * 1_000))
        change_id = schedule_change.c.id
        runs = sa.select(run.id).where(run.id < old_run, run.ended_at.is_not(None))
        changes = sa.select(change_id).where(change_id < old_change)
        with self._database.reading() as connection:
            old = list(connection.scalars(runs.order_by(run.id).limit(PRUNED_PER_STEP)))
            told = list(connection.scalars(changes.order_by(change_id).limit(PRUNED_PER_STEP)))
        drops = [sa.delete(schedule_run).where(run.id.in_(old))] if old else []
        drops += [sa.delete(schedule_change).where(change_id.in_(told))] if told else []
        gone = 0
        for drop in drops:
            gone += self._database.write(partial(_rows, drop))
        return gone


def _missed(connection: Connection, firing: Firing) -> int:
    """Planned times that were passed over; those that ran before a clock was set back are none."""
    if not firing.missed:
        return 0
    ran = (
        sa.select(sa.func.count())
        .where(run.schedule_id == firing.schedule.id, run.planned_at < firing.planned_at)
        .where(run.planned_at >= firing.schedule.next_at)
    )
    return max(0, firing.missed - connection.execute(ran).scalar_one())


def _rows(drop: sa.Delete, connection: Connection) -> int:
    return connection.execute(drop).rowcount


def _move(connection: Connection, seen: Schedule, next_at: datetime | None) -> bool:
    unchanged = (schedule.c.id == seen.id, schedule.c.next_at == seen.next_at, *_AWAKE)
    moved = sa.update(schedule).where(*unchanged).values(next_at=next_at)
    return connection.execute(moved).rowcount > 0


def _end_open(
    run_id: str,
    end: RunEnd,
    moment: datetime,
    condition: sa.ColumnElement[bool],
    connection: Connection,
) -> bool:
    return end_run(connection, run_id, end, moment, condition)
