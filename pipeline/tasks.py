"""The planner worker's Celery tasks: plan, tick and sweep.

`celery -A nightjar.pipeline.tasks` is the planner worker. Of several, one leads; a message that
another one takes goes back into the queue, from where the broker gives it to the planner that has
waited longest.
"""

import logging
import os
import socket
import uuid
from dataclasses import asdict
from functools import cache, partial
from threading import Lock

from celery.signals import worker_init, worker_shutdown

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.jobs.errors import StoreError
from nightjar.jobs.store import Store
from nightjar.pipeline.celery_app import (
    EXPECTED_ERRORS,
    PLAN_TASK,
    SWEEP_TASK,
    TICK_TASK,
    create_celery_app,
)
from nightjar.pipeline.dispatcher import dispatch, empty_queues
from nightjar.pipeline.leadership import Leadership
from nightjar.pipeline.model_change import ModelChange
from nightjar.pipeline.planner import Planner
from nightjar.pipeline.settings import Settings, SettingsError
from nightjar.pipeline.sweeper import Sweeper
from nightjar.process import spare_what_stays, step_back

logger = logging.getLogger(__name__)

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
        deaths_allowed=settings.request_worker_deaths,
        before_resending=_model_change().before_resending,
    )


@cache
def _model_change() -> ModelChange:
    empty = partial(empty_queues, app)
    return ModelChange(_store(), _planner().fingerprint, settings.on_model_change, empty)


@cache
def _leadership() -> Leadership:
    return Leadership(
        _store(),
        f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}",
        dead_after_s=settings.worker_dead_after_s,
        longest_gap_s=2 * settings.sweep_every_s,
    )


@worker_init.connect
def _open(**_: object) -> None:
    """Build everything before the pool's threads ask for it; a fault ends the worker here."""
    step_back(settings.worker_niceness)
    try:
        _planner()
    except (SettingsError, CheckpointError) as error:
        raise SystemExit(f"nightjar planner: {error}") from error
    _sweeper()
    _leadership()
    spare_what_stays()


@worker_shutdown.connect
def _close(**_: object) -> None:
    try:
        _leadership().resign()
    except StoreError as error:  # another planner takes over when it has waited
        logger.warning("the lead is not resigned: %s", error, extra={"action": "not_resigned"})


# Two threads that dispatch at once would publish the same micro-batches twice.
_dispatching = Lock()


def _dispatch() -> int:
    with _dispatching:
        return dispatch(app, _store(), settings.dispatch_window)


# A message that finds no leader after so many hands is taken where it is.
_MOST_HANDS = 3


def _hand_on(name: str, hands: int, **arguments: str) -> bool:
    """Leave a task to the leader, if another planner is known to lead."""
    if hands >= _MOST_HANDS or not _leadership().other_lives:
        return False
    app.send_task(name, kwargs={**arguments, "hands": hands + 1})
    return True


@app.task(name=PLAN_TASK, throws=EXPECTED_ERRORS)
def plan(job_id: str, hands: int = 0) -> dict[str, int]:
    """Plan one job and dispatch what is ready; sent when a job is submitted."""
    if _hand_on(PLAN_TASK, hands, job_id=job_id):
        return {"handed_on": 1}
    return {"requests": _planner().plan(job_id, after_chunk=_dispatch)}


@app.task(name=TICK_TASK, throws=EXPECTED_ERRORS)
def tick(hands: int = 0) -> dict[str, int]:
    """Plan and dispatch whatever waits, so that no lost message is needed for progress."""
    if _hand_on(TICK_TASK, hands):
        return {"handed_on": 1}
    planned = sum(_planner().plan(job, after_chunk=_dispatch) for job in _store().jobs_to_plan())
    return {"requests": planned, "dispatched": _dispatch()}


@app.task(name=SWEEP_TASK, throws=EXPECTED_ERRORS)
def sweep(hands: int = 0) -> dict[str, int]:
    """Release dead workers' leases and lost messages, then dispatch them; the leader alone."""
    if not _leadership().look():
        _sweeper().watch()
        return {"handed_on": int(_hand_on(SWEEP_TASK, hands))}
    report = _sweeper().sweep()
    _model_change().look()
    if report.released or report.requeued:
        _dispatch()
    return asdict(report)
