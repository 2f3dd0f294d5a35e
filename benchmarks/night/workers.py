"""A Celery worker that stands for many GPU workers: each of its threads is one of them.

It takes the messages, claims, finishes and beats as a GPU worker does, and computes nothing: an
answer takes `NIGHT_STEP_S`. Their names differ. The connections are shared, as through a pooler.
"""

import os
import threading
import time

from celery.signals import worker_init, worker_ready

from benchmarks.drawn_texts import drawn_texts
from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.records import NewResult
from nightjar.jobs.store import Store
from nightjar.jobs.workers import ComputeSeconds
from nightjar.pipeline.queue.celery_app import (
    COMPUTE_TASK,
    TICK_TASK,
    celery_queue,
    create_celery_app,
)
from nightjar.pipeline.queue.queues import compute_queues
from nightjar.pipeline.queue.waking import send_wake
from nightjar.pipeline.settings import Settings

STEP_S = float(os.environ["NIGHT_STEP_S"])
WORKERS = int(os.environ["NIGHT_WORKERS"])
TEXTS = list(drawn_texts(20_000, 75, seed=os.getpid()))
CONNECTIONS = 12
TICK_EVERY_S = 0.1

settings = Settings.read()
app = create_celery_app(settings)
store = Store(settings.database_url.get_secret_value(), connections=CONNECTIONS)
model = next(iter(settings.model_paths.values()))
fingerprint = ModelDirectory.open(model).fingerprint
app.conf.task_queues = [celery_queue(name) for name in compute_queues(fingerprint)]
_names = threading.local()
_number = iter(range(10**6))
_ticked = [0.0]


def _owner() -> str:
    if not hasattr(_names, "own"):
        _names.own = f"night-{os.getpid()}-{next(_number)}"
    return str(_names.own)


@worker_init.connect
def _none(**_: object) -> None:
    """Nothing is loaded."""


@worker_ready.connect
def _beat(**_: object) -> None:
    """Beat for every worker that this process stands for, one after another."""

    def beat() -> None:
        owners = [f"night-{os.getpid()}-{number}" for number in range(WORKERS)]
        while True:
            began = time.monotonic()
            for owner in owners:
                store.heartbeats.beat(owner, ComputeSeconds())
                store.leases.held_by(owner)
                time.sleep(settings.heartbeat_s / WORKERS / 2)
            time.sleep(max(0.0, settings.heartbeat_s - (time.monotonic() - began)))

    threading.Thread(target=beat, daemon=True).start()


def _answer(request_id: int) -> dict[str, object]:
    text = TEXTS[request_id % len(TEXTS)]
    return {"choices": [{"index": 0, "text": text, "finish_reason": "length"}]}


@app.task(name=COMPUTE_TASK)
def compute(micro_batch: int, epoch: int, alone: bool = False, live: bool = False) -> int:
    """Claim, wait, finish; returns how many rows landed."""
    owner = _owner()
    claimed = store.leases.claim(micro_batch, epoch, owner, fingerprint)
    if claimed is None:
        return 0
    time.sleep(STEP_S)
    results = [
        NewResult(
            request.id,
            200,
            _answer(request.id),
            prompt_tokens=100,
            completion_tokens=16,
            requested_tokens=16,
            finish_reason="length",
        )
        for request in claimed.requests
    ]
    landed = store.leases.finish(claimed.id, claimed.epoch, owner, results)
    if (now := time.monotonic()) - _ticked[0] > TICK_EVERY_S:
        _ticked[0] = now
        send_wake(app, TICK_TASK, retry=False)
    return len(results) if landed else 0
