"""A deployment worth looking at: jobs in every state, a worker, schedules with their runs.

Every text and every number is made up from a fixed seed, so that screenshots are alike.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from nightjar.jobs.accounts import Tenant
from nightjar.jobs.models import PlannedModel
from nightjar.jobs.records import JsonObject
from nightjar.jobs.schedule_records import (
    Definition,
    Firing,
    NewSchedule,
    RunEnd,
    RunState,
    Trigger,
)
from nightjar.jobs.schedules.times import Timetable
from nightjar.jobs.store import Store
from nightjar.jobs.store.schedule_tables import schedule_run
from nightjar.jobs.workers import ComputeSeconds
from tests.shown_jobs import (
    MODEL,
    SMALL,
    WORKER,
    Work,
    failing,
    judge,
    make,
    rank,
    ranking,
    review,
    say,
    talk,
)


def beat(store: Store) -> None:
    """A sign of life of the worker, with what it says of itself (`gpu_worker/worker/status.py`)."""
    models: list[JsonObject] = [
        {
            "name": name,
            "fingerprint": fingerprint,
            "device": "cuda:0",
            "precision": "fp16",
            "running": running,
            "slots": slots,
            "waiting": waiting,
            "kv_blocks": blocks,
            "kv_held": held,
            "kv_cached": cached,
        }
        for name, fingerprint, running, slots, waiting, blocks, held, cached in (
            ("hyperclova-6.9b", MODEL, 61, 64, 14, 4_096, 2_870, 512),
            ("reranker-1b", SMALL, 0, 32, 0, 1_024, 0, 96),
        )
    ]
    status: JsonObject = {"host": "gpu-1.night.example", "models": models, "micro_batch_count": 3}
    store.heartbeats.beat(WORKER, ComputeSeconds(9_340.0, 41.5), status)


@dataclass(frozen=True)
class Shown:
    """The jobs of a deployment by what they are for."""

    running: str
    failed: str
    ranked: str
    judged: str
    paused: str
    queued: str
    cancelled: str
    foreign: str
    schedule: str
    failing_schedule: str


def fill(store: Store) -> Shown:
    """Jobs in every state, of two tenants and two models, and a worker that computes."""
    store.models.plan_for(
        [PlannedModel("hyperclova-6.9b", MODEL, 2048), PlannedModel("reranker-1b", SMALL, 4096)]
    )
    for name in ("search", "shopping"):
        store.accounts.create_tenant(Tenant(name, 2.0 if name == "search" else 1.0))
    hour = timedelta(hours=1)
    small = {"fingerprint": SMALL, "model": "reranker-1b"}
    foreign = make(store, Work(talk, 150, say, tenant="search"))
    make(store, Work(ranking, 100, rank, tenant="shopping", **small))
    cancelled = make(store, Work(talk, 200, say, landed=0.4, ago=30 * hour))
    store.stopping.cancel(cancelled)
    judged = make(
        store, Work(review, 150, judge, ago=9 * hour, metadata={"run": "reviews-nightly"})
    )
    ranked = make(
        store,
        Work(ranking, 200, rank, ago=8 * hour, metadata={"for": "추천 후보 점수"}, **small),
    )
    failed = make(
        store, Work(talk, 600, failing, ago=6 * hour, took=hour, metadata={"run": "dialogues"})
    )
    paused = make(store, Work(talk, 400, say, landed=0.3, ago=3 * hour, took=hour))
    store.stopping.pause(paused)
    queued = make(store, Work(talk, 300, say, landed=0, planned=0, ago=hour / 6))
    running = make(
        store,
        Work(
            talk,
            2_400,
            say,
            landed=0.62,
            planned=0.9,
            held=3,
            took=hour,
            ago=hour,
            metadata={"run": "nightly-2026-11-24", "이름": "야간 대화 생성"},
        ),
    )
    store.models.serve(WORKER, [MODEL, SMALL])
    beat(store)
    store.shares.settle()
    jobs = (running, failed, ranked, judged, paused, queued, cancelled, foreign)
    return Shown(*jobs, *_schedules(store, ranked))


def _schedules(store: Store, job_id: str) -> tuple[str, str]:
    """One that succeeds each night, one that fails, and one that is paused; ids of two of them."""
    store.schedules.create(
        NewSchedule("reviews-weekly", Definition("30 6 * * MON", task_name="reviews")),
        "shown",
        None,
    )
    paused = store.schedules.find("default", "reviews-weekly")
    store.schedules.set_paused("default", paused.id, "shown", None, paused=True)
    seoul = Definition("0 2 * * *", "Asia/Seoul", task_name="rank-candidates")
    nightly = _with_runs(store, "recommendations", seoul, 9, job_id, None)
    file = Definition("15 4 * * *", file_id="file-0a1b2c3d4e5f", endpoint="/v1/completions")
    reason = "the file file-0a1b2c3d4e5f was deleted: upload it again, and name the new one"
    failing_ = _with_runs(store, "dialogues", file, 4, None, reason)
    return nightly, failing_


def _with_runs(
    store: Store,
    name: str,
    definition: Definition,
    days: int,
    job_id: str | None,
    reason: str | None,
) -> str:
    """A schedule whose last nights ended with success, or with this reason."""
    times = Timetable(definition.cron, definition.time_zone)
    at = times.after(datetime.now(UTC) - timedelta(days=days))
    made = store.schedules.create(NewSchedule(name, definition), "shown", at)
    while at is not None and at < datetime.now(UTC):
        after = times.after(at)
        seen = store.schedules.get("default", made.id)
        run = store.schedule_runs.fire(Firing(seen, at, after, 0, Trigger.PLANNED), at)
        assert run is not None
        _end(store, run.id, at, job_id, reason)
        at = after
    return made.id


def _end(store: Store, run_id: str, at: datetime, job_id: str | None, reason: str | None) -> None:
    claimed = store.schedule_work.claim("shown", at)
    if claimed is None:  # a file's run becomes a batch
        assert store.schedule_work.fail_file(run_id, reason or "", at)
        return
    rows = 48_210 + at.day * 37
    end = RunEnd(RunState.SUCCEEDED, total=rows, completed=rows - at.day % 3, failed=at.day % 3)
    assert store.schedule_work.finish(claimed, end, at + timedelta(minutes=41, seconds=at.day))
    named = sa.update(schedule_run).where(schedule_run.c.id == run_id).values(job_id=job_id)
    store.database.write(lambda connection: connection.execute(named))
