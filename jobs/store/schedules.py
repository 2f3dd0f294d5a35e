"""Schedules: what runs when, and who changed it. A tenant reaches only its own."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import (
    DuplicateScheduleError,
    TooManySchedulesError,
    UnknownScheduleError,
)
from nightjar.jobs.events import new_id
from nightjar.jobs.schedule_records import (
    ChangeAction,
    Definition,
    NewSchedule,
    RunState,
    Schedule,
    ScheduleChange,
    ScheduleOverview,
)
from nightjar.jobs.store.common import now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.schedule_rows import (
    IS_OPEN,
    RUN_FIELDS,
    locked_schedule,
    note_change,
    run,
    run_record,
    schedule_record,
)
from nightjar.jobs.store.schedule_tables import schedule, schedule_change, schedule_run
from nightjar.jobs.store.stopping import Stopping

MOST_OF_TENANT = 100
DELETED_PER_STEP = 1_000


class Schedules:
    """Makes, changes, lists and deletes schedules, and records who did it."""

    def __init__(self, database: Database, stopping: Stopping) -> None:
        self._database = database
        self._stopping = stopping

    def create(self, new: NewSchedule, actor: str, next_at: datetime | None) -> Schedule:
        """Store a schedule that runs for the first time at `next_at`.

        Raises:
            DuplicateScheduleError: The tenant has one of this name.
            TooManySchedulesError: The tenant has MOST_OF_TENANT.
        """
        moment = now()
        values = {
            **new.definition.values(),
            "id": new_id("sch"),
            "tenant": new.tenant,
            "name": new.name,
            "source": new.source,
            "paused": False,
            "next_at": next_at,
            "failures": 0,
            "created_at": moment,
            "changed_at": moment,
        }
        own = sa.select(sa.func.count()).where(schedule.c.tenant == new.tenant)
        insert = self._database.insert(schedule).values(values)
        added = insert.on_conflict_do_nothing(index_elements=[schedule.c.tenant, schedule.c.name])

        def work(connection: Connection) -> Schedule:
            # Two calls at once may pass the limit together, by as many as there are of them.
            if connection.execute(own).scalar_one() >= MOST_OF_TENANT:
                raise TooManySchedulesError(MOST_OF_TENANT)
            row = connection.execute(added.returning(*schedule.c)).one_or_none()
            if row is None:
                raise DuplicateScheduleError(new.name)
            made = schedule_record(row)
            after = new.definition.values()
            note_change(connection, made, ChangeAction.CREATED, actor, moment, after=after)
            return made

        return self._database.write(work)

    def update(
        self,
        seen: Schedule,
        definition: Definition,
        actor: str,
        next_at: datetime | None,
        *,
        source: str | None = None,
    ) -> Schedule:
        """Change what a schedule says; without a difference, nothing is changed or recorded.

        `source` is the schedule file that says so; None leaves it as it is.
        """

        def work(connection: Connection) -> Schedule:
            found = locked_schedule(connection, seen.tenant, seen.id)
            before, after = found.definition.values(), definition.values()
            values: dict[str, Any] = {"source": source or found.source}
            if before != after:
                values |= {**after, "changed_at": now()}
                values |= {} if found.paused else {"next_at": next_at}
                told = {"before": before, "after": after}
                note_change(connection, found, ChangeAction.UPDATED, actor, now(), **told)
            return _changed(connection, found, values)

        return self._database.write(work)

    def set_paused(
        self, tenant: str, schedule_id: str, actor: str, next_at: datetime | None, *, paused: bool
    ) -> Schedule:
        """Pause a schedule or let it go on; planned times that passed meanwhile do not count.

        Raises UnknownScheduleError.
        """
        action = ChangeAction.PAUSED if paused else ChangeAction.RESUMED

        def work(connection: Connection) -> Schedule:
            found = locked_schedule(connection, tenant, schedule_id)
            if found.paused == paused:
                return found
            note_change(connection, found, action, actor, now())
            return _changed(connection, found, {"paused": paused, "next_at": next_at})

        return self._database.write(work)

    def delete(self, tenant: str, schedule_id: str, actor: str) -> None:
        """Delete a schedule with its history, and cancel what it runs; raises UnknownScheduleError.

        The record of its changes stays.
        """
        open_jobs = sa.select(run.job_id).where(
            run.schedule_id == schedule_id, IS_OPEN, run.job_id.is_not(None)
        )
        stopped = (
            sa.update(schedule_run)
            .where(run.schedule_id == schedule_id, IS_OPEN)
            .values(
                state=RunState.CANCELLED,
                reason="the schedule was deleted",
                ended_at=now(),
                epoch=run.epoch + 1,
                owner=None,
            )
        )

        def stop(connection: Connection) -> list[str]:
            found = locked_schedule(connection, tenant, schedule_id)
            before = found.definition.values()
            note_change(connection, found, ChangeAction.DELETED, actor, now(), before=before)
            _changed(connection, found, {"paused": True, "next_at": None})
            jobs = [job_id for job_id in connection.scalars(open_jobs) if job_id is not None]
            connection.execute(stopped)
            return jobs

        for job_id in self._database.write(stop):
            self._stopping.request_cancel_if_there(job_id)
        some = sa.select(run.id).where(run.schedule_id == schedule_id).limit(DELETED_PER_STEP)
        drop = sa.delete(schedule_run).where(run.id.in_(some.scalar_subquery()))
        while self._database.write(lambda connection: connection.execute(drop).rowcount):
            pass
        # The foreign key takes a run with it that was added meanwhile.
        last = sa.delete(schedule).where(schedule.c.id == schedule_id)
        self._database.write(lambda connection: connection.execute(last))

    def get(self, tenant: str, schedule_id: str) -> Schedule:
        """The schedule; raises UnknownScheduleError."""
        return self._one(schedule_id, schedule.c.tenant == tenant, schedule.c.id == schedule_id)

    def find(self, tenant: str, name: str) -> Schedule:
        """The schedule of this name or id; raises UnknownScheduleError."""
        named = sa.or_(schedule.c.name == name, schedule.c.id == name)
        return self._one(name, schedule.c.tenant == tenant, named)

    def _one(self, told: str, *where: sa.ColumnElement[bool]) -> Schedule:
        with self._database.reading() as connection:
            row = connection.execute(sa.select(schedule).where(*where).limit(1)).one_or_none()
        if row is None:
            raise UnknownScheduleError(told[:64])
        return schedule_record(row)

    def overview(
        self, tenant: str | None, limit: int, after: str | None = None
    ) -> list[ScheduleOverview]:
        """Schedules with their newest runs, newest first; of all tenants if `tenant` is None.

        `after` is the id of the last one of the page before.
        """
        newest = sa.select(sa.func.max(run.id)).where(run.schedule_id == schedule.c.id)
        found = (
            sa.select(*schedule.c, *RUN_FIELDS)
            .outerjoin(schedule_run, run.id == newest.correlate(schedule).scalar_subquery())
            .order_by(schedule.c.id.desc())
            .limit(limit)
        )
        if tenant is not None:
            found = found.where(schedule.c.tenant == tenant)
        if after is not None:
            found = found.where(schedule.c.id < after)
        with self._database.reading() as connection:
            rows = connection.execute(found).all()
        return [
            ScheduleOverview(
                schedule_record(row), None if row._mapping[run.id] is None else run_record(row)
            )
            for row in rows
        ]

    def of_source(self, tenant: str, source: str) -> list[Schedule]:
        """The tenant's schedules that come from one schedule file."""
        found = sa.select(schedule).where(schedule.c.tenant == tenant, schedule.c.source == source)
        with self._database.reading() as connection:
            return [schedule_record(row) for row in connection.execute(found)]

    def changes(
        self, tenant: str, limit: int, after: str | None = None, schedule_id: str | None = None
    ) -> list[ScheduleChange]:
        """Changes of the tenant's schedules, also of deleted ones, newest first."""
        found = sa.select(schedule_change).where(schedule_change.c.tenant == tenant)
        if schedule_id is not None:
            found = found.where(schedule_change.c.schedule_id == schedule_id)
        if after is not None:
            found = found.where(schedule_change.c.id < after)
        with self._database.reading() as connection:
            rows = connection.execute(found.order_by(schedule_change.c.id.desc()).limit(limit))
            return [_change(row._mapping) for row in rows]


def _changed(connection: Connection, found: Schedule, values: Mapping[str, Any]) -> Schedule:
    changed = sa.update(schedule).where(schedule.c.id == found.id).values(dict(values))
    return schedule_record(connection.execute(changed.returning(*schedule.c)).one())


def _change(row: Mapping[Any, Any]) -> ScheduleChange:
    values = dict(row)
    values["before"] = json.loads(values["before"])
    values["after"] = json.loads(values["after"])
    return ScheduleChange(**values)
