"""Fault 16: foreign and stale messages in the queues of a busy system."""

from collections.abc import Iterator

import pytest
from celery import Celery
from kombu.serialization import registry
from pydantic import SecretStr

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.states import MicroBatchState, RequestKind
from nightjar.pipeline.embedded.broker import broker_url
from nightjar.pipeline.queue.celery_app import (
    COMPUTE_TASK,
    PLAN_TASK,
    celery_queue,
    create_celery_app,
)
from nightjar.pipeline.queue.queues import PLAN_QUEUE, compute_queue
from nightjar.pipeline.settings import Settings
from tests.faults.conftest import Place
from tests.faults.garbage import RAW
from tests.faults.load import wait_until_working
from tests.faults.system import System

pytestmark = pytest.mark.slow
# Arguments that the task cannot work with.
ARGUMENTS: list[dict[str, object]] = [
    {},
    {"micro_batch": "one", "epoch": 0},
    {"micro_batch": None, "epoch": None},
    {"micro_batch": 10**30, "epoch": 0},
    {"micro_batch": 1, "epoch": 0, "colour": "blue"},
    {"micro_batch": -1, "epoch": 0},
    {"micro_batch": 10**9, "epoch": 0},  # an unknown micro-batch
]


def queue_of(system: System) -> str:
    """A queue that the system's worker listens on."""
    model = ModelDirectory.open(system.environment["NIGHTJAR_MODEL"])
    return compute_queue(model.fingerprint, RequestKind.GENERATE, 32)


def send_garbage(system: System, app: Celery) -> int:
    """Put everything above into the queues; return the number of messages."""
    sent = 0
    compute = queue_of(system)
    for queue in (compute, f"{compute}\x06\x169", PLAN_QUEUE):
        for raw in RAW:
            system.broker.lpush(queue, raw)
            sent += 1
    for kwargs in ARGUMENTS:
        app.send_task(COMPUTE_TASK, kwargs=kwargs, queue=celery_queue(compute))
    app.send_task(PLAN_TASK, args=["no such job"])
    app.send_task(PLAN_TASK, args=[{"job": 1}])
    for name in (compute, PLAN_QUEUE):
        app.send_task("nightjar.unknown", queue=celery_queue(name))
        app.send_task(COMPUTE_TASK, kwargs={}, queue=celery_queue(name), serializer="pickle")
    return sent + len(ARGUMENTS) + 6


def send_stale(system: System, app: Celery) -> int:
    """Send messages of micro-batches that are done, and of epochs that are wrong or over."""
    ended = system.store.jobs.get_in_detail(system.jobs[0])[1][MicroBatchState.DONE]
    ids = range(1, 1 + min(ended, 20))  # the first job's are numbered from 1
    queue = celery_queue(queue_of(system))
    for id_ in ids:
        for epoch in (-1, 0, 7):
            app.send_task(COMPUTE_TASK, kwargs={"micro_batch": id_, "epoch": epoch}, queue=queue)
    return 3 * len(ids)


@pytest.fixture
def pickling() -> Iterator[None]:
    """Let this process send pickles; the workers refuse them."""
    registry.enable("pickle")
    yield
    registry.disable("pickle")


@pytest.mark.usefixtures("pickling")
def test_garbage_in_the_queues_ends_no_process_and_no_request(place: Place) -> None:
    with place.system() as system:
        app = create_celery_app(Settings(broker_url=SecretStr(broker_url(system.private))))
        with app:
            wait_until_working(system, "worker-0")
            sent = send_garbage(system, app)
            system.wait_done()
            sent += send_stale(system, app)
            wait_until_working(system, "worker-0")
            sent += send_garbage(system, app)
            system.wait_done()
        verdict = place.judge(system, 16, "garbage and stale messages in the queues", sent)
        verdict.check(0)
        assert not system.restarted
        log = system.log("worker-0")
        # Twice into two lists; pickles are dropped, too, and so is what cannot be a row's number.
        assert log.count("foreign message dropped") == 4 * len(RAW) + 4
