"""Reads what `nightjar top` shows: a few bounded statements for each picture."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from nightjar.jobs.records import Job
from nightjar.jobs.store import Store
from nightjar.jobs.store.depths import Depths
from nightjar.jobs.workers import WorkerStatus

MOST_JOBS = 100
MOST_WORKERS = 100
_COUNTED = ("prefill_tokens", "decode_tokens")  # a worker of an older version lacks them


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A deployment at one moment.

    jobs: Open ones, at most MOST_JOBS. workers: GPU workers that have beaten within a day, the
    latest sign first. models: The name of each fingerprint. taken_s: Of the monotonic clock.
    """

    at: datetime
    taken_s: float
    depths: Depths
    jobs: Sequence[Job]
    workers: Sequence[WorkerStatus]
    models: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Rates:
    """What came in each second between two snapshots; None where that is not known yet.

    rows: By job. tokens: Prefilled and decoded, of all workers.
    """

    rows: Mapping[str, float] = field(default_factory=dict)
    tokens: float | None = None


def take(store: Store) -> Snapshot:
    """Read a snapshot. Raises JobError."""
    return Snapshot(
        at=datetime.now(UTC),
        taken_s=time.monotonic(),
        depths=store.depths.read(),
        jobs=store.listing.unfinished(MOST_JOBS),
        workers=store.heartbeats.statuses(MOST_WORKERS),
        models={one.fingerprint: one.name for one in store.models.known()},
    )


def rates(before: Snapshot | None, now: Snapshot) -> Rates:
    """The rates between two snapshots; without an earlier one, those of jobs since their start."""
    if before is None:
        return Rates({job.id: _since_start(job, now.at) for job in now.jobs})
    seconds = max(now.taken_s - before.taken_s, 1e-3)
    earlier = {job.id: job.ended for job in before.jobs}
    rows = {
        job.id: max(0, job.ended - earlier.get(job.id, job.ended)) / seconds for job in now.jobs
    }
    return Rates(rows, _tokens_between(before, now) / seconds)


def _since_start(job: Job, at: datetime) -> float:
    if job.started_at is None:
        return 0.0
    seconds = (at - job.started_at).total_seconds()
    return job.ended / seconds if seconds > 0 else 0.0


def _tokens_between(before: Snapshot, now: Snapshot) -> int:
    """Tokens of workers that both snapshots know; a compute process that began anew counts 0."""
    earlier = {one.owner: _tokens(one) for one in before.workers}
    return sum(
        max(0, _tokens(one) - earlier[one.owner]) for one in now.workers if one.owner in earlier
    )


def _tokens(worker: WorkerStatus) -> int:
    models = worker.status.get("models", [])
    return sum(int(one.get(name) or 0) for one in models for name in _COUNTED)
