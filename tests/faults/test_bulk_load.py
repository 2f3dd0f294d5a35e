"""Fault 21: an urgent job and a killed worker beside bulk jobs that are still being planned."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from nightjar.jobs.states import RequestState
from nightjar.jobs.store.tables import request
from tests.faults.conftest import Place, undisturbed_answers
from tests.faults.load import rows_in_flight, taken_over
from tests.faults.oracle import most_in_flight
from tests.faults.rows import BULK_ROWS
from tests.faults.system import System

pytestmark = pytest.mark.slow
BULK_JOBS = 2
URGENT = 9
# Far above what an idle machine needs (the aim is 10 s each): the suite runs on busy ones.
MOST_S = 60.0
# The product's own times. 64 requests take a quarter of a second, four times at once in a worker.
BULK = {
    "NIGHTJAR_MICRO_BATCH_REQUESTS": "64",
    "NIGHTJAR_FAKE_STEP_S": "0.25",
    "NIGHTJAR_WORKER_THREADS": "4",
}


@pytest.fixture(scope="module")
def bulk_answers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What every row of a bulk job is answered when nobody dies."""
    folder = tmp_path_factory.mktemp("undisturbed-bulk")
    return undisturbed_answers(folder, tiny_model, BULK_ROWS)


def open_rows(system: System, jobs: list[str]) -> int:
    """How many requests of these jobs have no outcome."""
    found = [system.store.jobs.get(job_id) for job_id in jobs]
    return sum(job.total - job.ended for job in found)


def unplanned_rows(system: System, jobs: list[str]) -> int:
    """How many requests of these jobs are in no micro-batch yet."""
    queued = (request.c.job_id.in_(jobs)) & (request.c.state == RequestState.QUEUED)
    with system.store.database.reading() as connection:
        counted = sa.select(sa.func.count()).select_from(request).where(queued)
        return int(connection.scalar(counted) or 0)


def are_over(system: System) -> bool:
    return not system.open_jobs()


def note_what_came(
    awaited: Mapping[str, Callable[[], bool]], seconds: dict[str, float], struck: float
) -> bool:
    """Note after how many seconds each came that was not there before; whether any did."""
    new = [what for what, has_come in awaited.items() if what not in seconds and has_come()]
    seconds |= dict.fromkeys(new, time.monotonic() - struck)
    return bool(new)


def test_bulk_jobs_delay_neither_what_is_urgent_nor_a_dead_workers_work(
    place: Place, bulk_answers: Mapping[str, Any]
) -> None:
    place = replace(place, undisturbed=bulk_answers)
    with place.system(workers=2, environment=BULK) as system:
        bulk = [system.submit(BULK_ROWS) for _ in range(BULK_JOBS)]
        victim, other = system.workers
        system.wait_until("leases", lambda: len(system.leases(victim)) > 1)
        system.wait_until("leases", lambda: system.leases(other))
        ids, owner = rows_in_flight(system, victim), system.owner(victim)
        assert owner is not None
        struck = time.monotonic()
        system.kill(victim)
        urgent = system.submit(1, priority=URGENT)
        awaited: dict[str, Callable[[], bool]] = {
            "urgent job over": lambda: system.store.jobs.get(urgent).is_over,
            "leases taken back": lambda: not system.store.leases.held_by(owner),
            "its requests ran again": lambda: taken_over(system, ids, owner),
        }
        seconds: dict[str, float] = {}
        while len(seconds) < len(awaited):
            system.wait_until(
                f"more than {sorted(seconds)}",
                lambda: note_what_came(awaited, seconds, struck),
                MOST_S,
            )
        unplanned, waiting = unplanned_rows(system, bulk), open_rows(system, bulk)
        system.start(victim)
        system.wait_until("the bulk jobs", partial(are_over, system))
        came = ", ".join(f"{what} after {after_s:.1f} s" for what, after_s in seconds.items())
        note = f"{came}; then {waiting} bulk requests were open, {unplanned} not planned"
        verdict = place.judge(
            system,
            21,
            f"worker SIGKILL and an urgent row beside {BULK_JOBS} jobs of {BULK_ROWS:,} rows",
            1,
            recovery_s=max(seconds.values()),
            note=note,
        )
        verdict.check(most_in_flight(system))
        assert ids
        assert waiting  # else there was no load beside them
        assert max(seconds.values()) < MOST_S
        assert not system.restarted
