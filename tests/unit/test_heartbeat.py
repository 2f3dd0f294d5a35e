"""The heartbeat: from its start to its end, whatever the database says."""

import threading
from typing import cast

import pytest

from nightjar.gpu_worker.worker.heartbeat import Heartbeat
from nightjar.gpu_worker.worker.worker import GpuWorker
from nightjar.jobs.errors import StoreUnavailableError
from tests.processes import wait_until

EVERY_S = 0.01


class Worker:
    """A worker that counts its beats; the database is away for the first of them."""

    def __init__(self, away: int = 0) -> None:
        self.beats = 0
        self._away = away

    def keep_alive(self) -> None:
        self.beats += 1
        if self.beats <= self._away:
            raise StoreUnavailableError("away")


def heartbeat(worker: Worker) -> Heartbeat:
    return Heartbeat(cast(GpuWorker, worker), EVERY_S)


def test_it_beats_until_it_is_stopped() -> None:
    worker = Worker()
    beating = heartbeat(worker)
    wait_until("some beats", lambda: worker.beats > 3, 10)
    beating.stop()
    last = worker.beats
    threading.Event().wait(10 * EVERY_S)
    assert worker.beats == last


def test_a_database_that_is_away_does_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(away=2)
    beating = heartbeat(worker)
    wait_until("a beat that lands", lambda: worker.beats > 3, 10)
    beating.stop()
    assert [record.getMessage() for record in caplog.records] == ["no heartbeat: away"] * 2


def test_a_process_that_ends_does_not_wait_for_it() -> None:
    """Else a worker that fails would live on and keep its leases."""
    beating = heartbeat(Worker())
    threads = [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    beating.stop()
    assert [thread.daemon for thread in threads] == [True]
