"""What an unfinished job waits for, as far as the database shows it: for people, no decision."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs import lifecycle
from nightjar.jobs.records import Job, JobState, MicroBatchState
from nightjar.jobs.store.base import AWAITS_PLAN, StorePart, has_rows, now
from nightjar.jobs.store.reading import find_job
from nightjar.jobs.store.tables import micro_batch, request, worker

SWEEPER = "sweeper"
"""The owner in whose name the planner that leads beats, at every sweep."""

SILENT_AFTER_S = 15.0
"""Somebody who has given no sign of life for so long is said to be missing.

Signs are dated by the clocks of their machines: a clock that is wrong makes this wrong.
"""

_WAITING_BEHIND = "its turn: the GPU workers compute other work first"


class WaitsFor(StrEnum):
    """Who or what has to act before the job goes on."""

    RESUME = "resume"
    PLANNER = "planner"  # or the clock, or the broker: without any of them no planner sweeps
    GPU_WORKER = "gpu_worker"
    TURN = "turn"


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a job waits for; nothing while it is computed, or when it is over.

    message: says it to a person, with the mend; None with nothing in `waits_for`.
    """

    waits_for: tuple[WaitsFor, ...] = ()
    message: str | None = None


class WaitingStore(StorePart):
    """What people ask who see no progress."""

    def waiting_for(self, job_id: str) -> Waiting:
        """What keeps the job from going on now.  Cheap: a few rows are read, whatever its size.

        Raises UnknownJobError.
        """
        with self._database.reading() as connection:
            found = find_job(connection, job_id)
            if found.state is JobState.PAUSED:
                message = f"it is paused: `nightjar resume {job_id}` lets it go on"
                return Waiting((WaitsFor.RESUME,), message)
            if found.state not in lifecycle.RUNNABLE:
                return Waiting()
            return _of_running(connection, found)


def _of_running(connection: Connection, found: Job) -> Waiting:
    state = micro_batch.c.state
    planner, gpu_worker = _signs(connection)
    leased, in_broker = (
        _has(connection, micro_batch.c.id, micro_batch.c.job_id == found.id, state == one)
        for one in (MicroBatchState.LEASED, MicroBatchState.DISPATCHED)
    )
    missing: dict[WaitsFor, str] = {}
    if (silence := _silence(gpu_worker)) is not None:
        missing[WaitsFor.GPU_WORKER] = (
            f"no GPU worker {silence}: start `nightjar worker compute`; one that still loads the "
            "model is silent, too"
        )
    # What is in the broker or computed may wait for a planner as well, but not yet.
    needs_planner = not leased and not in_broker
    if needs_planner and (silence := _silence(planner)) is not None:
        missing[WaitsFor.PLANNER] = (
            f"no planner {silence}: start `nightjar worker plan` and `nightjar beat`, and see that "
            "both reach the broker"
        )
    if missing:
        return Waiting(tuple(missing), "; ".join(missing.values()))
    if leased:
        return Waiting()
    if _has(connection, request.c.row_index, request.c.job_id == found.id, AWAITS_PLAN):
        return Waiting((WaitsFor.PLANNER,), "its requests wait to be planned")
    return Waiting((WaitsFor.TURN,), _WAITING_BEHIND)


def _has(connection: Connection, column: sa.Column[int], *where: sa.ColumnElement[bool]) -> bool:
    return bool(connection.scalar(sa.select(has_rows(column, *where))))


def _signs(connection: Connection) -> tuple[datetime | None, datetime | None]:
    """The last signs of life: of a planner that leads, of any GPU worker."""
    is_sweeper = worker.c.owner == SWEEPER
    last = [sa.func.max(worker.c.seen_at).filter(who) for who in (is_sweeper, ~is_sweeper)]
    signs = connection.execute(sa.select(*last)).one()
    return signs[0], signs[1]


def _silence(sign: datetime | None) -> str | None:
    """How long somebody has been silent, for a sentence; None for one that lives."""
    if sign is None:
        return "has given a sign of life yet"
    silent_s = (now() - sign).total_seconds()
    return f"has given a sign of life for {silent_s:.0f} s" if silent_s > SILENT_AFTER_S else None
