"""Two real planner processes on one queue: one leads; it is killed, and the other takes over."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from celery import Celery

from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.store import Store
from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service
from nightjar.pipeline.queue.celery_app import PLAN_TASK, create_celery_app
from nightjar.pipeline.queue.commands import WorkerRole, beat_command, worker_command
from nightjar.pipeline.queue.leadership import PLANNER
from nightjar.pipeline.settings import Settings
from tests.databases import SQLITE_FIRST
from tests.jobs import submit
from tests.processes import wait_until
from tests.services import end_abruptly

GRACE_S = 10
NICENESS = 7


class Planners:
    """Two planners, their clock and a broker."""

    def __init__(self, folder: Path, settings: Settings, environment: dict[str, str]) -> None:
        def service(name: str, command: list[str]) -> Service:
            return Service(name, command, folder / f"{name}.log", environment, folder)

        self.broker = service("broker", broker_command(folder))
        command = worker_command(WorkerRole.PLAN, settings)
        names = ("ann", "bob")
        self.planners = [service(n, [*command, f"--hostname={n}@%h"]) for n in names]
        self.beat = service("beat", beat_command())
        self.app: Celery = create_celery_app(settings)

    def stop(self) -> None:
        self.app.close()
        for service in (self.beat, *self.planners, self.broker):
            service.stop(GRACE_S)

    def of(self, owner: str | None) -> Service:
        """The planner whose process leads."""
        pid = int((owner or "").split(":")[1])
        (found,) = (s for s in self.planners if s.process is not None and s.process.pid == pid)
        return found


@pytest.fixture
def planners(store: Store, database_url: str, tiny_model: Path) -> Iterator[Planners]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nightjar-")))
        given = {
            "NIGHTJAR_DATABASE_URL": database_url,
            "NIGHTJAR_BROKER_URL": broker_url(folder),
            "NIGHTJAR_MODEL": str(tiny_model),
            "NIGHTJAR_ACCEPT_ANY_MODEL": "true",
            "NIGHTJAR_SWEEP_EVERY_S": "0.5",
            "NIGHTJAR_WORKER_DEAD_AFTER_S": "4",
            "NIGHTJAR_WORKER_NICENESS": str(NICENESS),
            "PYTHONPATH": os.environ.get("PYTHONPATH", str(Path.cwd())),
        }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("NIGHTJAR_")}
        settings = Settings.read(broker_url=broker_url(folder))
        running = Planners(folder, settings, inherited | given)
        stack.callback(running.stop)
        running.broker.start()
        wait_for_broker(folder, running.broker)
        for service in (*running.planners, running.beat):
            service.start()
        yield running


def leader(store: Store) -> tuple[str | None, int]:
    found = store.leaders.get(PLANNER)
    return (None, 0) if found is None else (found.owner, found.epoch)


def is_dispatched(store: Store, job_id: str) -> bool:
    return store.jobs.get_in_detail(job_id)[1][MicroBatchState.DISPATCHED] > 0


@pytest.mark.parametrize("database_url", SQLITE_FIRST, indirect=True)
def test_one_leads_and_the_other_takes_over_when_it_is_killed(
    store: Store, planners: Planners
) -> None:
    wait_until("a leader", lambda: leader(store)[0])
    first, epoch = leader(store)
    of_planners = [psutil.Process(s.process.pid) for s in planners.planners if s.process]
    wanted = max(os.nice(0), NICENESS)
    wait_until("both are nice", lambda: {p.nice() for p in of_planners} == {wanted})
    jobs = [submit(store, [{"prompt": f"p {n}"}]) for n in range(3)]
    for job_id in jobs:
        planners.app.send_task(PLAN_TASK, [job_id])
    wait_until("the plans", lambda: all(is_dispatched(store, job_id) for job_id in jobs))
    assert leader(store) == (first, epoch)
    both = [service.log.read_text() for service in planners.planners]
    end_abruptly(planners.of(first))
    wait_until("another leader", lambda: leader(store)[1] == epoch + 1)
    second, _ = leader(store)
    assert second != first
    survivor = planners.of(second)
    assert "leads from epoch 1 on" not in both[planners.planners.index(survivor)]
    late = submit(store, [{"prompt": "late"}])
    planners.app.send_task(PLAN_TASK, [late])
    wait_until("the plan of the survivor", lambda: is_dispatched(store, late))
    survivor.stop(GRACE_S)
    assert leader(store)[0] is None  # it has resigned
