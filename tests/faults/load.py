"""Keeping a system busy, and following what a process had in flight when something happened."""

import re
import time
from collections.abc import Set
from functools import partial

import sqlalchemy as sa

from nightjar.jobs.states import MicroBatchState, RequestKind, RequestState
from nightjar.jobs.store.tables import micro_batch, request
from nightjar.pipeline.queue.queues import BUCKETS
from tests.faults.system import System

JOB_ROWS = 300


def wait_until_working(system: System, *names: str, rows: int = JOB_ROWS) -> None:
    """Until each of these workers holds leases; one job after the other keeps them busy."""
    system.wait_until(f"{', '.join(names)} to work", partial(_all_work, system, names, rows))


def _all_work(system: System, names: tuple[str, ...], rows: int) -> bool:
    if not system.open_jobs():
        system.submit(rows)
    return all(system.leases(name) for name in names)


def rows_in_flight(system: System, name: str) -> set[int]:
    """The ids of the requests that a worker holds and that have no outcome yet."""
    ids = [ref.id for ref in system.leases(name)]
    statement = sa.select(request.c.id).where(
        request.c.micro_batch_id.in_(ids), request.c.state == RequestState.PLANNED
    )
    with system.store.database.reading() as connection:
        return set(connection.scalars(statement))


def wait_until_taken_over(system: System, ids: Set[int], owner: str | None) -> float:
    """Until each of these requests has ended or another owner holds it; the seconds it took."""
    return system.wait_until("others to take it", partial(taken_over, system, ids, owner))


def taken_over(system: System, ids: Set[int], owner: str | None) -> bool:
    """Whether each of these requests has ended or another owner holds it."""
    held = (micro_batch.c.state == MicroBatchState.LEASED) & (micro_batch.c.owner != owner)
    waiting = (
        sa.select(sa.func.count())
        .select_from(request.join(micro_batch))
        .where(request.c.id.in_(ids), request.c.state == RequestState.PLANNED, ~held)
    )
    with system.store.database.reading() as connection:
        return connection.scalar(waiting) == 0


def outcomes(system: System) -> int:
    """How many requests of all jobs have ended."""
    return sum(system.store.jobs.get(job_id).ended for job_id in system.jobs)


def is_moving(system: System, before: int) -> bool:
    """Whether requests have ended since there were so many."""
    return outcomes(system) > before or not system.open_jobs()


def seconds_to_move(system: System) -> float:
    """From now until a further request ends."""
    return system.wait_until("a further outcome", partial(is_moving, system, outcomes(system)))


def let_pass(system: System, seconds: float) -> None:
    """Time goes by, and the supervisor works."""
    over = time.monotonic() + seconds
    system.wait_until("time to go by", lambda: time.monotonic() > over)


def carries_micro_batches(key: bytes) -> bool:
    """Whether a key of the broker is the list of a compute queue, of any priority.

    The planner's queue has another form of name, and so have the keys of kombu and Celery.
    """
    kinds, buckets = "|".join(kind.value for kind in RequestKind), "|".join(map(str, BUCKETS))
    queue = key.decode().split("\x06")[0]
    return re.fullmatch(rf"([0-9a-f]+-)?({kinds})-({buckets})", queue) is not None
