"""The short selection of `make test`: each kind of end once, to one busy system."""

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.states import RequestKind
from nightjar.pipeline.queue.queues import compute_queue
from nightjar.pipeline.settings import Settings
from tests.faults.load import carries_micro_batches, wait_until_working
from tests.faults.oracle import answers, judge, most_in_flight
from tests.faults.system import BROKER, PLANNER, System, running_system

WORKER = "worker-0"
ROWS = 120


def lose_a_message(system: System) -> None:
    """What a worker leaves that is killed after the pop and before its note."""
    for key in system.broker.scan_iter():
        if carries_micro_batches(key):
            system.broker.rpop(key)


def put_garbage(system: System) -> None:
    model = ModelDirectory.open(system.environment["NIGHTJAR_MODEL"])
    for raw in (b"not JSON", b"[]", b"{}"):
        system.broker.lpush(compute_queue(model.fingerprint, RequestKind.GENERATE, 32), raw)


def drop_connections(system: System) -> None:
    system.broker.client_kill_filter(_type="normal", skipme=True)


def niceness_of_workers(system: System) -> set[int]:
    """Of planner, GPU worker and compute process."""
    worker = psutil.Process(system.pid(WORKER))
    parts = [psutil.Process(system.pid(PLANNER)), worker, *worker.children(recursive=True)]
    assert len(parts) > 2
    return {process.nice() for process in parts}


STRIKES: list[Callable[[System], object]] = [
    put_garbage,
    lambda system: system.restart(WORKER),
    lambda system: system.restart(PLANNER),
    drop_connections,
    lose_a_message,
    lambda system: system.broker.flushall(),
    lambda system: system.restart(BROKER),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "database_url", [pytest.param("sqlite", marks=pytest.mark.slow), "postgresql"], indirect=True
)
def test_nothing_is_lost_or_done_twice_whatever_ends(
    database_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    with running_system(tmp_path, database_url, tiny_model) as system:
        undisturbed_job = system.submit(ROWS)
        system.wait_done()
        undisturbed = answers(system.store, undisturbed_job)
        assert len(undisturbed) == ROWS
        assert niceness_of_workers(system) == {max(os.nice(0), Settings().worker_niceness)}
        system.submit(ROWS)
        for strike in STRIKES:
            wait_until_working(system, WORKER, rows=ROWS)
            strike(system)
        system.wait_done()
        assert not system.restarted
        assert "foreign message dropped" in system.log(WORKER)
        # One worker was killed; what the others lost nobody had begun.
        judge(system, undisturbed).check(most_in_flight(system))
