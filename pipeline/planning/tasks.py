"""The planner worker: its passes, and the Celery tasks that wake them.

`celery -A nightjar.pipeline.planning.tasks` starts a planner worker. Of several, one leads, and all
plan. A message that another planner takes goes back into the queue; the broker gives it to the
planner that has waited longest. Tasks only wake the passes, which run in their own threads
(pipeline/queue/passes.py).
"""

import logging
import time
from collections.abc import Sequence
from functools import cache, partial

from celery.signals import worker_init, worker_ready, worker_shutdown
from kombu.exceptions import OperationalError

from nightjar.checkpoints import CheckpointError
from nightjar.jobs.errors import StoreError
from nightjar.jobs.model_choice import ConfiguredModels
from nightjar.jobs.records import JobLimits, MicroBatchRef
from nightjar.jobs.store import Store
from nightjar.jobs.webhooks.addresses import AddressGuard
from nightjar.jobs.webhooks.sender import WebhookSender
from nightjar.pipeline.metrics import declarations as declared
from nightjar.pipeline.metrics.opening import open_metrics
from nightjar.pipeline.metrics.recording import recorder
from nightjar.pipeline.planning.agreement import Agreement
from nightjar.pipeline.planning.finalize import Finalizer
from nightjar.pipeline.planning.ingest import Ingest
from nightjar.pipeline.planning.model_change import ModelChange
from nightjar.pipeline.planning.models import KnownModels, PlanningModels
from nightjar.pipeline.planning.planner import Planner
from nightjar.pipeline.queue.celery_app import (
    EXPECTED_ERRORS,
    PLAN_TASK,
    SWEEP_TASK,
    TICK_TASK,
    create_celery_app,
)
from nightjar.pipeline.queue.delivering import Delivering
from nightjar.pipeline.queue.dispatcher import dispatch, empty_queues, find_lost
from nightjar.pipeline.queue.leadership import Leadership
from nightjar.pipeline.queue.liveness import owner_name
from nightjar.pipeline.queue.opening import open_store
from nightjar.pipeline.queue.passes import Pass
from nightjar.pipeline.queue.scheduling import Scheduling
from nightjar.pipeline.queue.sweeper import Sweeper
from nightjar.pipeline.queue.waking import send_wake
from nightjar.pipeline.settings import Settings, SettingsError
from nightjar.pipeline.tracing.tracer import traces
from nightjar.process import spare_what_stays, step_back

logger = logging.getLogger(__name__)

settings = Settings.read()
app = create_celery_app(settings)


@cache
def _store() -> Store:
    return open_store(settings)


@cache
def _models() -> PlanningModels:
    return PlanningModels.open(settings, _store())


@cache
def _planner() -> Planner:
    return Planner(settings, _store(), _models(), owner=_owner())


@cache
def _owner() -> str:
    return owner_name()


@cache
def _agreement() -> Agreement:
    return Agreement(_store().planners, _planner().plans_with)


@cache
def _known_models() -> KnownModels:
    return KnownModels(_store().models, _models())


@cache
def _ingest() -> Ingest:
    return Ingest(
        _store(),
        limits=JobLimits(settings.max_job_rows, settings.max_rejected_lines),
        models=ConfiguredModels(tuple(settings.model_paths), settings.accept_any_model),
        attempts=settings.plan_attempts,
    )


@cache
def _finalizer() -> Finalizer:
    return Finalizer(_store())


@cache
def _sweeper() -> Sweeper:
    return Sweeper(
        _store(),
        dead_after_s=settings.worker_dead_after_s,
        redispatch_after_s=settings.redispatch_after_s,
        longest_gap_s=2 * settings.sweep_every_s,
        deaths_allowed=settings.request_worker_deaths,
        keep_calls_s=settings.live_keep_s,
        keep_results_s=settings.keep_results_s,
        purge_only_exported=settings.purge_only_exported,
        find_lost=_find_lost,
    )


def _find_lost(
    unclaimed: Sequence[MicroBatchRef], overdue: Sequence[MicroBatchRef]
) -> Sequence[MicroBatchRef]:
    _model_change().warn_of_waiting(overdue)
    return find_lost(app, unclaimed, overdue)


@cache
def _model_change() -> ModelChange:
    empty = partial(empty_queues, app)
    served = _models().fingerprints
    return ModelChange(_store().replanning, served, settings.on_model_change, empty)


@cache
def _leadership() -> Leadership:
    return Leadership(
        _store().leaders,
        _owner(),
        dead_after_s=settings.worker_dead_after_s,
        longest_gap_s=2 * settings.sweep_every_s,
        trusted_s=_LEAD_TRUSTED_S,
    )


@cache
def _delivering() -> Delivering:
    guard = AddressGuard(allow_private=settings.webhook_allow_private)
    sender = WebhookSender(guard, timeout_s=settings.webhook_timeout_s)
    return Delivering(
        _store().deliveries,
        sender.send,
        keep_days=settings.webhook_keep_days,
        idle_s=settings.sweep_every_s,
        freed=_passes()["deliver"].wake,
    )


@cache
def _scheduling() -> Scheduling:
    return Scheduling.of(settings, _store())


@worker_init.connect
def _open(**_: object) -> None:
    """Build everything before the pool's threads need it; an error ends the worker here."""
    step_back(settings.worker_niceness)
    try:
        traces.open(settings, declared.PLANNER)
        _planner()
    except (SettingsError, CheckpointError) as error:
        raise SystemExit(f"nightjar planner: {error}") from error
    _sweeper()
    _leadership()
    open_metrics(settings, declared.PLANNER, _store())
    recorder.add_readings(lambda: [(declared.LEADS, [((), float(_leadership().may_act()))])])
    _ingest()
    spare_what_stays()
    _delivering()
    _scheduling()
    for name in ("sweep", "ingest", "finalize", "deliver", "schedule"):  # they need no broker
        _passes()[name].start()


@worker_ready.connect
def _begin(**_: object) -> None:
    for name in ("plan", "dispatch"):
        _passes()[name].start()


@worker_shutdown.connect
def _close(**_: object) -> None:
    for one in _passes().values():
        one.stop(_STOP_S)
    _ingest().drop()
    _delivering().close()
    try:
        _store().planners.leave(_owner())
        _leadership().resign()
    except StoreError as error:  # another planner takes the lead after its waiting time
        logger.warning("the lead is not resigned: %s", error, extra={"action": "not_resigned"})


# Beat, submissions and GPU workers wake the planner; without a wake it plans so often.
_UNWOKEN_S = 2 * settings.sweep_every_s
# While workers take messages: often, so that the broker never runs empty.
_DISPATCH_AGAIN_S = 0.1
# Nobody says when a job is over: workers end jobs in SQL.
_FINALIZE_LOOK_S = min(0.3, settings.sweep_every_s)
_LEAD_TRUSTED_S = 0.1
# GPU workers send ticks ten times a second, for planning and dispatching.
_LEAST_S = {"ingest": 0.2, "schedule": min(1.0, settings.sweep_every_s)}
_COUNT_AGAIN_S = 0.01  # the other passes get their turn
_STOP_S = 20.0


def _plan_step() -> float:
    """Plan a chunk, if this planner still leads or plans as the leader does."""
    leads = _leadership().may_act()
    if not leads and not _agreement().holds:
        return _UNWOKEN_S
    with recorder.operation("plan_chunk") as timing:
        planned = timing.found(_planner().plan_next())
    recorder.count(declared.PLANNED, by=planned)
    if planned:
        if leads:
            _passes()["dispatch"].wake()
        else:
            _tell_leader()
        return 0.0
    pause_s = _planner().pause_s()
    return _UNWOKEN_S if pause_s is None else min(pause_s, _UNWOKEN_S)


def _tell_leader() -> None:
    """Ask the leader to dispatch; it also looks by itself."""
    try:
        send_wake(app, TICK_TASK, retry=False)
    except OperationalError as error:
        logger.warning("the leader is not told: %s", error, extra={"action": "not_told"})


def _trace_of(job_id: str) -> str | None:
    return _store().traces.of_jobs([job_id]).get(job_id) if traces.is_on else None


def _dispatch_step() -> float:
    if not _leadership().may_act():
        return _UNWOKEN_S
    with recorder.operation("dispatch") as timing:
        count = timing.found(dispatch(app, _store().planning, settings.dispatch_window, _trace_of))
    recorder.count(declared.DISPATCHED, by=count)
    return _DISPATCH_AGAIN_S if count else _UNWOKEN_S


def _ingest_step() -> float:
    """Read a part of a batch's file, if this planner still leads."""
    if not _leadership().may_act():
        _ingest().drop()
        return _UNWOKEN_S
    with recorder.operation("ingest") as timing:
        report = _ingest().step()
        timing.found(report.pause_s == 0)
    if report.landed:
        _passes()["plan"].wake()
    return _UNWOKEN_S if report.pause_s is None else min(report.pause_s, _UNWOKEN_S)


def _finalize_step() -> float:
    """Count results of batches that are over, if this planner still leads."""
    if not _leadership().may_act():
        return _UNWOKEN_S
    began = time.monotonic()
    with recorder.operation("finalize") as timing:
        counted = timing.found(_finalizer().step())
    if counted:
        return _COUNT_AGAIN_S
    # A look reads every running batch: where there are many, it takes a small share of the time.
    return max(_FINALIZE_LOOK_S, 20 * (time.monotonic() - began))


def _deliver_step() -> float:
    return _delivering().step() if _leadership().may_act() else _UNWOKEN_S


def _schedule_step() -> float:
    return _scheduling().step() if _leadership().may_act() else _UNWOKEN_S


def _sweep_step() -> float:
    """Renew or watch the lead, and sweep as the leader."""
    began = time.monotonic()
    _planner().beat()
    leads = _leadership().check()
    _agreement().look(_leadership().other)
    _known_models().write(leads=leads)
    if not leads:
        _sweeper().watch()
        return settings.sweep_every_s
    with recorder.operation("sweep"):
        report = _sweeper().sweep(settings.sweep_every_s / 2)
    recorder.count(declared.TAKEN_BACK, by=report.released)
    recorder.count(declared.RESENT, by=report.requeued)
    if _model_change().take_apart():
        _passes()["plan"].wake()
    if report.released or report.requeued:
        _passes()["dispatch"].wake()
    # The next sweep is due by the clock, also after a long one.
    took_s = time.monotonic() - began
    return max(settings.sweep_every_s / 10, settings.sweep_every_s - took_s)


@cache
def _passes() -> dict[str, Pass]:
    steps = {
        "sweep": _sweep_step,
        "plan": _plan_step,
        "dispatch": _dispatch_step,
        "ingest": _ingest_step,
        "finalize": _finalize_step,
        "deliver": _deliver_step,
        "schedule": _schedule_step,
    }
    every_s = settings.sweep_every_s
    return {
        name: Pass(name, step, every_s, _LEAST_S.get(name, 0.0)) for name, step in steps.items()
    }


# A message that so many planners have passed on is dropped: the leader also wakes by itself.
_MOST_HANDS = 3


def _wake(name: str, hands: int) -> dict[str, int]:
    """Wake the passes, or pass the message on where another planner is known to lead."""
    if _agreement().holds:
        _passes()["plan"].wake()
    if not _leadership().other_lives:
        for one in ("ingest", "plan", "dispatch", "schedule"):
            _passes()[one].wake()
        return {}
    if hands < _MOST_HANDS:
        app.send_task(name, kwargs={"hands": hands + 1})
    return {"handed_on": 1}


@app.task(name=PLAN_TASK, throws=EXPECTED_ERRORS)
def plan(job_id: str = "", hands: int = 0) -> dict[str, int]:
    """Wake the planner after a submission; rank decides which job is planned next."""
    return _wake(PLAN_TASK, hands)


@app.task(name=TICK_TASK, throws=EXPECTED_ERRORS)
def tick(hands: int = 0) -> dict[str, int]:
    """Wake the passes regularly, so that progress needs no other message."""
    return _wake(TICK_TASK, hands)


@app.task(name=SWEEP_TASK, throws=EXPECTED_ERRORS)
def sweep(hands: int = 0) -> dict[str, int]:
    """Take a message of an earlier version's beat; each planner sweeps by itself."""
    return {}
