"""The planner worker's Celery tasks: plan, tick and sweep.

`celery -A nightjar.pipeline.tasks` is the planner worker.
"""

from dataclasses import asdict
from functools import cache
from threading import Lock

from celery.signals import worker_init

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.jobs.store import Store
from nightjar.pipeline.celery_app import (
    EXPECTED_ERRORS,
    PLAN_TASK,
    SWEEP_TASK,
    TICK_TASK,
    create_celery_app,
)
from nightjar.pipeline.collector import spare_what_stays
from nightjar.pipeline.dispatcher import dispatch
from nightjar.pipeline.planner import Planner
from nightjar.pipeline.settings import Settings, SettingsError
from nightjar.pipeline.sweeper import Sweeper

settings = Settings.read()
app = create_celery_app(settings)


@cache
def _store() -> Store:
    return Store(settings.database_url.get_secret_value())


@cache
def _planner() -> Planner:
    if settings.model is None:
        raise SettingsError("NIGHTJAR_MODEL is not set: name the directory of the served model")
    return Planner(settings, _store(), ModelDirectory.open(settings.model))


@cache
def _sweeper() -> Sweeper:
    return Sweeper(
        _store(),
        dead_after_s=settings.worker_dead_after_s,
        redispatch_after_s=settings.redispatch_after_s,
        longest_gap_s=2 * settings.sweep_every_s,
        crashes_allowed=settings.request_crashes,
    )


@worker_init.connect
def _open(**_: object) -> None:
    """Build everything before the pool's threads ask for it; a fault ends the worker here."""
    try:
        _planner()
    except (SettingsError, CheckpointError) as error:
        raise SystemExit(f"nightjar planner: {error}") from error
    _sweeper()
    spare_what_stays()


# Two threads that dispatch at once would publish the same micro-batches twice.
_dispatching = Lock()


def _dispatch() -> int:
    with _dispatching:
        return dispatch(app, _store(), settings.dispatch_window)


@app.task(name=PLAN_TASK, throws=EXPECTED_ERRORS)
def plan(job_id: str) -> dict[str, int]:
    """Plan one job and dispatch what is ready; sent when a job is submitted."""
    return {"requests": _planner().plan(job_id, after_chunk=_dispatch)}


@app.task(name=TICK_TASK, throws=EXPECTED_ERRORS)
def tick() -> dict[str, int]:
    """Plan and dispatch whatever waits, so that no lost message is needed for progress."""
    planned = sum(_planner().plan(job, after_chunk=_dispatch) for job in _store().jobs_to_plan())
    return {"requests": planned, "dispatched": _dispatch()}


@app.task(name=SWEEP_TASK, throws=EXPECTED_ERRORS)
def sweep() -> dict[str, int]:
    """Release dead workers' leases and lost messages, then dispatch them."""
    report = _sweeper().sweep()
    if report.released or report.requeued:
        _dispatch()
    return asdict(report)
