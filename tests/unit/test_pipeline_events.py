"""Events of tasks are sent together, none is kept for long, and Celery uses what does it."""

import time
from collections.abc import Iterator

import pytest
from celery.utils.imports import symbol_by_name
from kombu.asynchronous.hub import Hub
from pydantic import SecretStr
from vine import promise

from nightjar.pipeline.queue.celery_app import (
    COMPUTE_TASK,
    PLAN_TASK,
    SWEEP_TASK,
    TICK_TASK,
    create_celery_app,
)
from nightjar.pipeline.queue.events import FLUSH_EVERY_S, Consumer
from nightjar.pipeline.settings import Settings


class Dispatcher:
    """Buffers as Celery's does; notes how many events each flush found."""

    def __init__(self) -> None:
        self.waiting = 0
        self.flushes: list[int] = []

    def flush(self) -> None:
        self.flushes.append(self.waiting)
        self.waiting = 0


class LoneConsumer(Consumer):
    """A consumer with a loop and a dispatcher, and nothing else."""

    def __init__(self, events: Dispatcher) -> None:
        self.hub = Hub()
        self.event_dispatcher = events
        self._flush_events_promise = promise(self._flush_events)


class Worker:
    """A consumer on a real loop."""

    def __init__(self) -> None:
        self.events = Dispatcher()
        self.consumer = LoneConsumer(self.events)

    def event(self) -> None:
        self.events.waiting += 1
        self.consumer.on_send_event_buffered()

    def turn(self, seconds: float = 0.0) -> None:
        """Let the loop go on for so long; once at least."""
        end = time.monotonic() + seconds
        while True:
            next(self.consumer.hub.loop)
            if time.monotonic() >= end:
                return
            time.sleep(0.005)


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.consumer.hub.close()


def test_an_event_after_a_pause_is_sent_at_once(worker: Worker) -> None:
    worker.event()
    worker.turn()
    assert worker.events.flushes == [1]


def test_events_that_follow_are_sent_together(worker: Worker) -> None:
    worker.event()
    worker.turn()
    for _ in range(10):
        worker.event()
    worker.turn(2 * FLUSH_EVERY_S)
    assert worker.events.flushes == [1, 10]


def test_the_next_pause_is_a_pause_again(worker: Worker) -> None:
    for _ in range(2):
        worker.event()
        worker.turn(2 * FLUSH_EVERY_S)
    assert [found for found in worker.events.flushes if found] == [1, 1]


def test_a_loop_that_forgot_its_timers_sends_the_events_that_come_later(worker: Worker) -> None:
    worker.event()
    worker.turn()
    worker.consumer.hub.timer.clear()  # as after a connection that was lost
    worker.event()
    time.sleep(FLUSH_EVERY_S)
    worker.event()
    worker.turn()
    assert worker.events.flushes == [1, 2]


def test_celery_uses_it() -> None:
    app = create_celery_app(Settings(broker_url=SecretStr("redis://127.0.0.1:1/0")))
    assert issubclass(symbol_by_name(app.conf.worker_consumer), Consumer)


def test_flower_shows_no_tasks_but_those_that_compute() -> None:
    app = create_celery_app(Settings(broker_url=SecretStr("redis://127.0.0.1:1/0")))
    names = (PLAN_TASK, SWEEP_TASK, TICK_TASK, COMPUTE_TASK)

    def work() -> None: ...

    app.finalize()
    # A module of tasks that another test imported has registered its own in every application.
    tasks = {name: app.tasks.get(name) or app.task(work, name=name) for name in names}
    assert [name for name in names if tasks[name].send_events] == [COMPUTE_TASK]
