"""Makes the schedules of a deployment what a schedule file says."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from nightjar.jobs.schedules.steering import Change, Steering
from nightjar.jobs.store import Store
from nightjar.pipeline.schedules.schedule_file import ScheduleFile


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of one schedule; `left` is no longer in the file, and was not deleted."""

    name: str
    change: Change | Literal["deleted", "left"]
    next_at: datetime | None


def apply_file(
    store: Store, file: ScheduleFile, tenant: str, actor: str, *, prune: bool
) -> list[Applied]:
    """Make or change each schedule of the file, each in a transaction of its own.

    prune: Delete the schedules that came from this file and are no longer in it.
    """
    steering, source = Steering(store, tenant, actor), str(file.path)
    report = []
    for name, definition in file.schedules.items():
        put = steering.put(name, definition, source)
        report.append(Applied(name, put.change, put.schedule.next_at))
    for gone in store.schedules.of_source(tenant, source):
        if gone.name in file.schedules:
            continue
        if prune:
            steering.delete(gone.id)
        report.append(Applied(gone.name, "deleted" if prune else "left", gone.next_at))
    return report
