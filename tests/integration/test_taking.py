"""Real workers: one that takes nothing while messages wait ends, and what reaches Flower."""

import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from celery import Celery
from celery.events import EventReceiver
from pydantic import SecretStr

from nightjar.pipeline.embedded.broker import broker_url
from nightjar.pipeline.queue.celery_app import TICK_TASK, create_celery_app
from nightjar.pipeline.queue.commands import PLANNER_APP, WorkerRole, worker_command
from nightjar.pipeline.queue.queues import PLAN_QUEUE
from nightjar.pipeline.queue.taking import EXIT_STUCK
from nightjar.pipeline.queue.waking import messages_waiting
from nightjar.pipeline.settings import Settings
from tests.faults.system import BROKER, HASTE, PLANNER, System

STUCK_AFTER_S = 2.0
PATIENCE_S = 60.0


@pytest.fixture
def system(tmp_path: Path, sqlite_url: str, tiny_model: Path) -> Iterator[System]:
    """A system with a broker and nothing else yet."""
    environment = HASTE | {"NIGHTJAR_WORKER_STUCK_AFTER_S": str(STUCK_AFTER_S)}
    system = System(tmp_path, sqlite_url, tiny_model, environment=environment)
    try:
        system.store.migrate()
        system.start(BROKER)
        yield system
    finally:
        system.close()


@pytest.fixture
def app(system: System) -> Iterator[Celery]:
    with create_celery_app(Settings(broker_url=SecretStr(broker_url(system.private)))) as opened:
        yield opened


def test_a_worker_that_takes_nothing_while_messages_wait_ends(system: System, app: Celery) -> None:
    command = worker_command(WorkerRole.PLAN, Settings())
    place = command.index(PLANNER_APP)
    service = system.services[PLANNER]
    service.command = [*command[:place], "tests.integration.stuck_planner", *command[place + 1 :]]
    system.start(PLANNER)
    process = service.process
    assert process is not None
    system.wait_until("the planner", lambda: "ready" in system.log(PLANNER), PATIENCE_S)
    with pytest.raises(Exception, match="timed out"):
        process.wait(2 * STUCK_AFTER_S)  # nothing waits for it
    app.send_task(TICK_TASK)
    assert process.wait(PATIENCE_S) == EXIT_STUCK
    assert "action=worker_stuck" in system.log(PLANNER)
    assert sys.executable in command


def test_ticks_and_sweeps_stay_out_of_flower(system: System, app: Celery) -> None:
    """They are a dozen a second, and Flower remembers its last 100,000 tasks."""
    system.start(PLANNER)
    system.wait_until("the planner", lambda: "ready" in system.log(PLANNER), PATIENCE_S)
    seen: list[str] = []
    with app.connection_for_read() as connection:
        receiver = EventReceiver(
            connection, app=app, handlers={"*": lambda event: seen.append(event["type"])}
        )
        thread = Thread(target=receiver.capture, kwargs={"limit": None, "wakeup": False})
        thread.start()
        try:
            system.wait_until("a heartbeat", lambda: seen, PATIENCE_S)
            for _ in range(3):
                app.send_task(TICK_TASK)
            system.wait_until(
                "the ticks", lambda: not messages_waiting(app, PLAN_QUEUE), PATIENCE_S
            )
            beats = seen.count("worker-heartbeat")
            system.wait_until(
                "later heartbeats", lambda: seen.count("worker-heartbeat") > beats + 1, PATIENCE_S
            )
        finally:
            receiver.should_stop = True
            thread.join()
    assert [kind for kind in seen if kind.startswith("task-")] == []
