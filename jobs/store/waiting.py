"""What an unfinished job waits for, as far as the database shows it.

For people only: no decision rests on it.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs import lifecycle
from nightjar.jobs.records import Job
from nightjar.jobs.states import JobState, MicroBatchState
from nightjar.jobs.store.awaiting import GIVEN_HAS_UNPLANNED
from nightjar.jobs.store.common import has_rows, now
from nightjar.jobs.store.job_rows import find_job
from nightjar.jobs.store.model_tables import model, worker_model
from nightjar.jobs.store.tables import READY_ALONE, job, micro_batch, worker

SWEEPER = "sweeper"
"""The owner under which the planner that leads beats, at every sweep."""

SILENT_AFTER_S = 15.0
"""A process without a sign of life for so long is called missing.

Signs carry the time of the machine's own clock: a wrong clock makes this wrong.
"""

_of_job = sa.bindparam("of_job", type_=sa.String)


def _micro_batches(state: MicroBatchState) -> sa.ColumnElement[bool]:
    own = micro_batch.c.job_id == _of_job
    return has_rows(micro_batch.c.id, own, micro_batch.c.state == state)


def _last_sign(of: sa.ColumnElement[bool]) -> sa.ScalarSelect[datetime | None]:
    return sa.select(sa.func.max(worker.c.seen_at)).where(of).scalar_subquery()


# One statement, as every poll of a waiting job runs it. It reads the last signs of life of the
# planner that leads and of any GPU worker, and what the job has.
_SEEN = sa.select(
    _last_sign(worker.c.owner == SWEEPER),
    _last_sign(worker.c.owner != SWEEPER),
    _micro_batches(MicroBatchState.LEASED),
    _micro_batches(MicroBatchState.DISPATCHED),
    GIVEN_HAS_UNPLANNED,
)
_IN_FLIGHT = [MicroBatchState.DISPATCHED, MicroBatchState.LEASED]
# Never many: the dispatch window bounds what is in flight.
_SERVED = (
    sa.select(job.c.tenant)
    .join(micro_batch, micro_batch.c.job_id == job.c.id)
    .where(micro_batch.c.state.in_(_IN_FLIGHT))
    .distinct()
)
_MOST_NAMED = 5
_MOMENT = worker.c.seen_at.type
_IS_READY: sa.ColumnElement[bool] = sa.and_(READY_ALONE)
_planned_for = (
    micro_batch.c.job_id == _of_job,
    micro_batch.c.fingerprint == model.c.fingerprint,
)
# The models that work of the job needs and no living worker serves: a step in an index for each.
_UNSERVED = (
    sa.select(model.c.name)
    .where(
        ~sa.exists().where(
            worker_model.c.fingerprint == model.c.fingerprint,
            worker.c.owner == worker_model.c.owner,
            worker.c.seen_at > sa.bindparam("since", type_=_MOMENT),
        ),
        sa.or_(
            sa.and_(sa.bindparam("awaits_plan"), model.c.name == sa.bindparam("job_model")),
            has_rows(micro_batch.c.id, *_planned_for, _IS_READY),
            has_rows(
                micro_batch.c.id, *_planned_for, micro_batch.c.state == MicroBatchState.DISPATCHED
            ),
        ),
    )
    .order_by(model.c.name)
    .limit(_MOST_NAMED)
)
# Whether the job's model is planned for: by its name, or as the only one. True where no planner
# has said what it plans for: one of the version before says nothing.
_count = sa.select(sa.func.count()).select_from(model)
_IS_PLANNED_FOR = sa.select(
    sa.or_(
        _count.where(model.c.name == job.c.model).scalar_subquery() > 0,
        _count.scalar_subquery() == 0,
        sa.and_(~job.c.names_model, _count.scalar_subquery() == 1),
    )
).where(job.c.id == _of_job)
_WAITING_BEHIND = "its turn: the GPU workers compute other work first"
_WAITING_BEHIND_TENANTS = (
    "its turn: the GPU workers compute work of other tenants first, as tenants share them by weight"
)


class WaitsFor(StrEnum):
    """Who or what has to act before the job goes on."""

    RESUME = "resume"
    PLANNER = "planner"  # or the clock, or the broker: without any of them no planner sweeps
    GPU_WORKER = "gpu_worker"
    MODEL = "model"  # a planner or a GPU worker of its model
    TURN = "turn"
    ROWS = "rows"  # of the producer of an open job


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a job waits for; nothing while it is computed, or when it is over.

    message: for a person, and how to mend it; None if `waits_for` is empty.
    """

    waits_for: tuple[WaitsFor, ...] = ()
    message: str | None = None


def waiting_for(connection: Connection, job_id: str) -> Waiting:
    """What keeps the job from going on now; raises UnknownJobError.

    Cheap: it reads a few rows, whatever the size of the job.
    """
    found = find_job(connection, job_id)
    if found.state is JobState.PAUSED:
        message = f"it is paused: `nightjar resume {job_id}` continues it"
        return Waiting((WaitsFor.RESUME,), message)
    if found.state not in lifecycle.RUNNABLE:
        return Waiting()
    if found.takes_rows and found.ended == found.total:
        return Waiting((WaitsFor.ROWS,), "it is open: append rows to it, seal it, or cancel it")
    return _of_running(connection, found)


def _of_running(connection: Connection, found: Job) -> Waiting:
    planner, gpu_worker, leased, in_broker, awaits_plan = connection.execute(
        _SEEN, {"of_job": found.id}
    ).one()
    missing: dict[WaitsFor, str] = {}
    if (silence := _silence(gpu_worker)) is not None:
        missing[WaitsFor.GPU_WORKER] = (
            f"no GPU worker {silence}: start `nightjar worker compute`; one that still loads the "
            "model is silent, too"
        )
    # A planner may be missing, too, but as long as work is in the broker or leased nobody needs it.
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
    if trouble := _model_trouble(connection, found, awaits_plan=bool(awaits_plan)):
        return Waiting((WaitsFor.MODEL,), trouble)
    if awaits_plan:
        return Waiting((WaitsFor.PLANNER,), "its requests wait to be planned")
    served = set(connection.scalars(_SERVED))
    behind_tenants = bool(served) and found.tenant not in served
    message = _WAITING_BEHIND_TENANTS if behind_tenants else _WAITING_BEHIND
    return Waiting((WaitsFor.TURN,), message)


def _model_trouble(connection: Connection, found: Job, *, awaits_plan: bool) -> str | None:
    """Which model of the job is missing, and how to mend it; None if all are there."""
    key = {"of_job": found.id}
    if awaits_plan and not connection.scalar(_IS_PLANNED_FOR, key):
        return (
            f"no planner plans for the model {found.model!r}: name it in NIGHTJAR_MODELS, of the "
            "planners and of a GPU worker"
        )
    since = now() - timedelta(seconds=SILENT_AFTER_S)
    values = {**key, "job_model": found.model, "awaits_plan": awaits_plan, "since": since}
    unserved = connection.scalars(_UNSERVED, values).all()
    if not unserved:
        return None
    return (
        f"no GPU worker serves {' and '.join(map(repr, unserved))}: start `nightjar worker "
        "compute` with that model; one that still loads it is silent"
    )


def _silence(sign: datetime | None) -> str | None:
    """How long a process has been silent, as part of a sentence; None for one that lives."""
    if sign is None:
        return "has given a sign of life yet"
    silent_s = (now() - sign).total_seconds()
    return f"has given a sign of life for {silent_s:.0f} s" if silent_s > SILENT_AFTER_S else None
