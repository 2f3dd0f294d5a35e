"""The GPU worker's Celery task; `celery -A nightjar.gpu_worker.worker.tasks` starts the worker.

The worker holds no model: for each that it serves, a launcher starts a compute process, and a crash
there does not end the worker.
"""

import sys
import threading
from dataclasses import asdict, dataclass
from functools import partial

from celery.signals import worker_init, worker_shutdown, worker_shutting_down

from nightjar.checkpoints import CheckpointError
from nightjar.gpu_worker.worker.engine_metrics import engine_readings
from nightjar.gpu_worker.worker.flights import LauncherError
from nightjar.gpu_worker.worker.heartbeat import Heartbeat
from nightjar.gpu_worker.worker.served import ServedModel, serve
from nightjar.gpu_worker.worker.starting import start
from nightjar.gpu_worker.worker.ticker import Ticker
from nightjar.gpu_worker.worker.worker import OUTCOME_WORDS, GpuWorker
from nightjar.jobs.store import Store
from nightjar.pipeline.metrics import declarations as declared
from nightjar.pipeline.metrics.opening import open_metrics
from nightjar.pipeline.metrics.recording import recorder
from nightjar.pipeline.queue.celery_app import (
    COMPUTE_TASK,
    EXPECTED_ERRORS,
    TICK_TASK,
    create_celery_app,
    listen_for,
)
from nightjar.pipeline.queue.commands import CANNOT_START, EXIT_CANNOT_START
from nightjar.pipeline.queue.opening import open_store
from nightjar.pipeline.queue.waking import send_wake
from nightjar.pipeline.settings import Settings, SettingsError
from nightjar.pipeline.tracing.tracer import traces
from nightjar.process import spare_what_stays

# Longer than the database's own limit on a statement: a second connection is tried first.
_FINISH_HANGS_AFTER_S = 120.0
# One for the results of jobs, one for what waits for no disk: hundreds of workers share a server.
_CONNECTIONS = 2

settings = Settings.read()
app = create_celery_app(settings)


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts that live as long as the worker process."""

    store: Store
    models: list[ServedModel]
    worker: GpuWorker
    heartbeat: Heartbeat
    ticker: Ticker

    @classmethod
    def open(cls) -> "WorkerParts":
        """Connect to the store and start a compute process for each model.

        Raises:
            CheckpointError, LauncherError, SettingsError: A model cannot be served.
        """
        started = start(settings)
        store = open_store(settings, connections=_CONNECTIONS)
        # Before the models are loaded, so that a change of their files meanwhile is noticed.
        fingerprints = [directory.fingerprint for directory in started.directories.values()]
        listen_for(app, fingerprints, settings.worker_live_threads)
        models = serve(settings, store, started.directories, started.launchers)
        worker = GpuWorker(
            store,
            models,
            crashes_allowed=settings.request_crashes,
            hung_after_beats=max(1, round(_FINISH_HANGS_AFTER_S / settings.heartbeat_s)),
        )
        open_metrics(settings, declared.GPU_WORKER, store)
        recorder.add_readings(partial(engine_readings, models))
        heartbeat = Heartbeat(worker, settings.heartbeat_s)
        return cls(store, models, worker, heartbeat, Ticker(partial(send_wake, app, TICK_TASK)))

    def close(self) -> None:
        """End the compute processes and give back every lease."""
        self.heartbeat.stop()
        self.ticker.close()
        for model in self.models:
            model.launcher.close()
        self.worker.leave()
        self.store.close()


# What this process opened: nothing before it has started.
opened: list[WorkerParts] = []


@worker_init.connect
def _open(**_: object) -> None:
    """Load the models before the first message is taken; an error ends the worker here."""
    try:
        traces.open(settings, declared.GPU_WORKER)
        opened.append(WorkerParts.open())
        start(settings).serving.set()
    except (CheckpointError, LauncherError, SettingsError) as error:
        sys.stderr.write(f"{CANNOT_START}{error}\n")
        raise SystemExit(EXIT_CANNOT_START) from error
    spare_what_stays()


@worker_shutting_down.connect
def _drain(**_: object) -> None:
    """Drain after TERM: Celery takes no more messages and waits for the running tasks."""
    for parts in opened:
        drain = partial(parts.worker.drain, settings.drain_s)
        # In a thread, because a signal handler must not wait.
        threading.Thread(target=drain, name="drain", daemon=True).start()


@worker_shutdown.connect
def _close(**_: object) -> None:
    for parts in opened:
        parts.close()


@app.task(name=COMPUTE_TASK, throws=EXPECTED_ERRORS)
def compute(
    micro_batch: int, epoch: int, alone: bool = False, live: bool = False
) -> dict[str, object]:
    """Compute one micro-batch; Flower shows the returned value. `live`: it is a single call."""
    parts = opened[0]
    try:
        said = {"nightjar.micro_batch": micro_batch, "nightjar.epoch": epoch}
        with traces.span("micro-batch", compute.request.get("traceparent"), said):
            outcome = parts.worker.run(micro_batch, epoch, alone=alone, live=live)
    except BaseException:
        recorder.count(declared.MICRO_BATCHES, "error")
        raise
    recorder.count(declared.MICRO_BATCHES, OUTCOME_WORDS[outcome.outcome])
    if not live:
        parts.ticker.tick()  # one more micro-batch may be dispatched
    return asdict(outcome)
