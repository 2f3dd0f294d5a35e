"""How much waits in the whole deployment, for metrics: bounded readings of indexes."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from nightjar.jobs import lifecycle
from nightjar.jobs.states import JobState, MicroBatchState
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.tables import READY_ALONE, job, micro_batch

MOST_READY = 2_000
"""Ready micro-batches of one model that a reading counts."""
MOST_IN_FLIGHT = 10_000
MOST_JOBS = 10_000
_MOST_MODELS = 33  # the most that a deployment serves, and one of an older version

_mb = micro_batch.c
_most = sa.bindparam("most", type_=sa.Integer)
_NEXT_MODEL = (
    sa.select(_mb.fingerprint)
    .where(_mb.fingerprint > sa.bindparam("after"), READY_ALONE)
    .order_by(_mb.fingerprint)
    .limit(1)
)
_READY = (
    sa.select(_mb.job_id, _mb.kind, _mb.bucket)
    .where(_mb.fingerprint == sa.bindparam("of_model"), READY_ALONE)
    .order_by(_mb.job_id, _mb.id)
    .limit(_most)
    .subquery()
)
_COUNT_READY = (
    sa.select(_READY.c.kind, _READY.c.bucket, sa.func.count(), sa.func.min(job.c.created_at))
    .join(job, job.c.id == _READY.c.job_id)
    .group_by(_READY.c.kind, _READY.c.bucket)
)
_FLYING = (
    sa.select(_mb.job_id, _mb.fingerprint, _mb.kind, _mb.bucket, _mb.state)
    .where(_mb.state == sa.bindparam("in_state", type_=_mb.state.type))
    .order_by(_mb.job_id, _mb.id)
    .limit(_most)
    .subquery()
)
_COUNT_FLYING = (
    sa.select(
        _FLYING.c.fingerprint,
        _FLYING.c.kind,
        _FLYING.c.bucket,
        sa.func.count(),
        sa.func.min(job.c.created_at),
    )
    .join(job, job.c.id == _FLYING.c.job_id)
    .group_by(_FLYING.c.fingerprint, _FLYING.c.kind, _FLYING.c.bucket)
)
_JOBS = (
    sa.select((job.c.total - job.c.completed - job.c.failed - job.c.cancelled).label("open"))
    .where(job.c.state == sa.bindparam("in_state", type_=job.c.state.type))
    .limit(_most)
    .subquery()
)
_COUNT_JOBS = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(_JOBS.c.open), 0))
_OPEN = (*lifecycle.RUNNABLE, JobState.PAUSED, JobState.CANCELLING)


@dataclass(frozen=True, slots=True)
class Queue:
    """Micro-batches of one model, kind, bucket and state.

    oldest: When the oldest of their jobs was made.
    """

    fingerprint: str
    kind: str
    bucket: int
    state: MicroBatchState
    count: int
    oldest: datetime


@dataclass(frozen=True, slots=True)
class Depths:
    """What waits. With `cut`, there is more than was counted."""

    queues: list[Queue]
    jobs: int
    rows: int
    cut: bool


class Waiting:
    """Reads how much waits."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self) -> Depths:
        """Count micro-batches and open jobs, by indexes and up to the bounds of this module."""
        queues: list[Queue] = []
        counts: Counter[str] = Counter()
        with self._database.reading() as connection:
            for fingerprint in self._models(connection):
                key = {"of_model": fingerprint, "most": MOST_READY}
                for kind, bucket, count, oldest in connection.execute(_COUNT_READY, key).all():
                    ready = MicroBatchState.READY
                    queues.append(Queue(fingerprint, kind.value, bucket, ready, count, oldest))
                    counts[fingerprint] += count
            for state in (MicroBatchState.DISPATCHED, MicroBatchState.LEASED):
                values = {"in_state": state, "most": MOST_IN_FLIGHT}
                for found, kind, bucket, count, oldest in connection.execute(_COUNT_FLYING, values):
                    queues.append(Queue(found, kind.value, bucket, state, count, oldest))
            jobs = rows = 0
            for job_state in _OPEN:
                some = {"in_state": job_state, "most": MOST_JOBS}
                more, left = connection.execute(_COUNT_JOBS, some).one()
                jobs, rows = jobs + more, rows + int(left)
        cut = any(count >= MOST_READY for count in counts.values()) or jobs >= MOST_JOBS
        return Depths(queues, jobs, rows, cut)

    def _models(self, connection: sa.engine.Connection) -> list[str]:
        found = [""]
        while len(found) < _MOST_MODELS:
            following = connection.scalar(_NEXT_MODEL, {"after": found[-1]})
            if following is None:
                break
            found.append(following)
        return found
