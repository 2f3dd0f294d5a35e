"""PostgreSQL is killed in mid-write, again and again, while jobs come in and are computed."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightjar.jobs.errors import StoreUnavailableError
from nightjar.jobs.records import NewJob
from tests.faults.conftest import Note
from tests.faults.oracle import Answers, judge, most_in_flight
from tests.faults.postgres import PrivatePostgres, private_postgres
from tests.faults.rows import request_rows
from tests.faults.system import PLANNER, System, running_system


@pytest.fixture(scope="module")
def postgres() -> Iterator[PrivatePostgres]:
    with private_postgres() as server:
        yield server


@pytest.fixture
def database_url(postgres: PrivatePostgres) -> Iterator[str]:
    with postgres.fresh_database() as url:
        yield url


# By the number of kills. 64 every half second are what the system computes in that time: whoever
# kills once need not wait for a backlog.
ROWS = {1: 64, 10: 200}


class Submitter:
    """Sends jobs, each with a key of its own, again and again until it hears that it is stored."""

    def __init__(self, system: System, rows: int) -> None:
        self._system = system
        self._rows = rows
        self._stop = threading.Event()
        self.refused = 0
        self._thread = threading.Thread(target=self._submit_all)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _submit_all(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            self._system.jobs.append(self._submit(f"job-{number}"))
            self._stop.wait(0.5)

    def _submit(self, key: str) -> str:
        while True:
            try:
                with self._system.store.jobs.submit(NewJob("tiny", key)) as submission:
                    submission.add(request_rows(self._rows))
            except StoreUnavailableError:
                self.refused += 1
                time.sleep(0.05)
            else:
                return submission.job_id


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_postgres_killed_and_restarted_in_mid_write(
    tmp_path: Path,
    postgres: PrivatePostgres,
    database_url: str,
    tiny_model: Path,
    undisturbed: Answers,
    note: Note,
    times: int,
) -> None:
    rng = random.Random(10)
    with running_system(tmp_path, database_url, tiny_model) as system:
        submitter = Submitter(system, ROWS[times])
        back = 0.0
        try:
            for _ in range(times):
                landed = _landed(system)
                waited = system.wait_until("results", lambda at=landed: _landed(system) > at)
                back = max(back, waited)
                time.sleep(rng.uniform(0, 1))
                postgres.kill()
                time.sleep(rng.uniform(0, 1))
                postgres.start()
        finally:
            submitter.stop()
        system.wait_done()
        verdict = judge(system, undisturbed)
        assert len(system.store.jobs.newest(100)) == len(set(system.jobs)) == len(system.jobs)
        assert system.restarted.total() == 0, system.restarted
        for name in (PLANNER, "worker-0"):
            assert "not available" in system.log(name)
            assert "Traceback" not in system.log(name), system.log(name)
        verdict.check(times * most_in_flight(system))
        said = "results land again; nothing had to be restarted"
        note(10, "PostgreSQL killed in mid-write", times, verdict, recovery_s=back, note=said)


def _landed(system: System) -> int:
    return sum(system.store.jobs.get(job_id).ended for job_id in list(system.jobs))
