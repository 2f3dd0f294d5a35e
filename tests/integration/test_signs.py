"""Jobs and `/health` say which part of the deployment is not there."""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from celery import Celery
from fastapi.testclient import TestClient
from pydantic import SecretStr

from nightjar.jobs.api import create_app
from nightjar.jobs.store import Store
from nightjar.jobs.store.waiting import SWEEPER
from nightjar.jobs.workers import ComputeSeconds
from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service
from nightjar.pipeline.front.health import Part, trouble
from nightjar.pipeline.front.signs import (
    NO_BEAT,
    NO_BROKER,
    NO_GPU_WORKER,
    NO_PLANNER,
    NO_TASK_RUNNER,
    OLD_PLANNER,
    Signs,
)
from nightjar.pipeline.queue.celery_app import TICK_TASK, create_celery_app
from nightjar.pipeline.queue.leadership import PLANNER, PROTOCOL
from nightjar.pipeline.runner.process import TaskRunner
from nightjar.pipeline.settings import Settings
from tests.processes import wait_until
from tests.schedules import Clock, add_schedule

OK = "ok"


@pytest.fixture
def store(sqlite_tables: str) -> Iterator[Store]:
    opened = Store(sqlite_tables)
    yield opened
    opened.close()


@pytest.fixture
def broker() -> Iterator[tuple[Service, Celery]]:
    with tempfile.TemporaryDirectory(prefix="nightjar-") as name:
        directory = Path(name)
        service = Service("broker", broker_command(directory), directory / "log", {}, directory)
        service.start()
        wait_for_broker(directory, service)
        celery = create_celery_app(Settings(broker_url=SecretStr(broker_url(directory))))
        celery.conf.broker_transport_options["max_retries"] = 0
        yield service, celery
        celery.close()
        service.stop(5)


@contextmanager
def living(
    store: Store, *, worker: bool, planner: bool, protocol: int = PROTOCOL
) -> Iterator[None]:
    """A GPU worker that beats, a planner that leads."""
    stop = threading.Event()

    def live() -> None:
        seen = store.leaders.get(PLANNER)
        lead = store.leaders.take(PLANNER, "p", seen, protocol) if planner else None
        while not stop.wait(0.05):
            if worker:
                store.heartbeats.beat("w", ComputeSeconds())
            if lead is not None:
                store.leaders.renew(lead)
                store.heartbeats.beat(SWEEPER, ComputeSeconds())  # as its sweeps do

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_task_runner_is_missed_where_tasks_are_scheduled(
    store: Store, broker: tuple[Service, Celery], sqlite_tables: str
) -> None:
    settings = Settings(database_url=SecretStr(sqlite_tables), heartbeat_s=0.05)
    runner = TaskRunner(store, settings, {})
    working = threading.Thread(target=runner.run)
    with Signs(store, broker[1], dead_after_s=0.3, read_every_s=0.05) as signs:
        wait_until("a look", lambda: signs.parts()["gpu_workers"] == NO_GPU_WORKER)
        assert "task_runners" not in signs.parts()
        add_schedule(store, Clock())
        wait_until("a need", lambda: signs.parts().get("task_runners") == NO_TASK_RUNNER)
        working.start()
        wait_until("a runner", lambda: signs.parts()["task_runners"] == OK)
        assert signs.parts()["gpu_workers"] == NO_GPU_WORKER
        assert trouble(Part.TASKS, settings) is None
        runner.stop()
        working.join()
        wait_until("its end", lambda: signs.parts()["task_runners"] == NO_TASK_RUNNER)
        assert "no task runner of" in (trouble(Part.TASKS, settings) or "")


def test_each_part_that_is_not_there_is_named(store: Store, broker: tuple[Service, Celery]) -> None:
    service, celery = broker
    signs = Signs(store, celery, dead_after_s=0.5, read_every_s=0.1)
    assert signs.parts()["gpu_workers"] == "unknown"  # it has only begun to look
    with signs, TestClient(create_app(store, lambda _: None, deployment=signs)) as client:

        def parts() -> dict[str, str]:
            answer = client.get("/health")
            assert answer.status_code == 200  # jobs are taken, whoever else is missing
            found: dict[str, str] = answer.json()["parts"]
            assert found.pop("database") == found.pop("uploads") == OK
            return found

        with living(store, worker=True, planner=True):
            wait_until("all of them", lambda: set(parts().values()) == {OK})
        with living(store, worker=False, planner=True):
            wait_until("the worker's end", lambda: parts()["gpu_workers"] == NO_GPU_WORKER)
            assert parts()["planner"] == parts()["beat"] == OK
        with living(store, worker=False, planner=True, protocol=PROTOCOL - 1):
            wait_until("the older planner", lambda: parts()["planner"] == OLD_PLANNER)
            assert parts()["beat"] == OK
        wait_until("silence", lambda: parts()["beat"] == NO_BEAT)
        for _ in range(2):
            celery.send_task(TICK_TASK)  # the clock goes on, and nobody takes what it sends
        wait_until("a backlog", lambda: parts()["planner"] == NO_PLANNER)
        service.stop(5)
        wait_until("the broker's end", lambda: parts()["broker"] == NO_BROKER)
        assert parts()["planner"] == "unknown"
