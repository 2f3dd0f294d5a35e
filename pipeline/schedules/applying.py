"""Makes the schedules of a deployment what a schedule file says."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from nightjar.jobs.errors import UnknownScheduleError
from nightjar.jobs.schedule_records import NewSchedule
from nightjar.jobs.schedules.times import next_of
from nightjar.jobs.store import Store
from nightjar.pipeline.schedules.schedule_file import ScheduleFile

Change = Literal["created", "updated", "unchanged", "deleted", "left"]


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of one schedule; `left` is no longer in the file, and was not deleted."""

    name: str
    change: Change
    next_at: datetime | None


def apply_file(
    store: Store, file: ScheduleFile, tenant: str, actor: str, *, prune: bool
) -> list[Applied]:
    """Make or change each schedule of the file, each in a transaction of its own.

    prune: Delete the schedules that came from this file and are no longer in it.
    """
    moment, source = store.schedule_runs.clock(), str(file.path)
    report = []
    for name, definition in file.schedules.items():
        next_at = next_of(definition, moment)
        change: Change
        try:
            seen = store.schedules.find(tenant, name)
        except UnknownScheduleError:
            new = NewSchedule(name, definition, tenant, source)
            made, change = store.schedules.create(new, actor, next_at), "created"
        else:
            change = "unchanged" if seen.definition == definition else "updated"
            made = store.schedules.update(seen, definition, actor, next_at, source=source)
        report.append(Applied(name, change, made.next_at))
    for gone in store.schedules.of_source(tenant, source):
        if gone.name in file.schedules:
            continue
        if prune:
            store.schedules.delete(tenant, gone.id, actor)
        report.append(Applied(gone.name, "deleted" if prune else "left", gone.next_at))
    return report
