"""100,000 requests queued at once, then steady work for as long as asked: memory stays flat.

NIGHTJAR_TEST_SOAK_S says how long, an hour unless given.
"""

import os
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from benchmarks.control_plane.watch import Watch, families_of
from tests.faults.conftest import Note
from tests.faults.oracle import Answers, judge
from tests.faults.rows import MOST_ROWS
from tests.faults.system import HASTE, System, running_system

SOAK_S = float(os.environ.get("NIGHTJAR_TEST_SOAK_S", "3600"))
QUEUED = 100_000
JOB_EVERY_S = 4.0  # 500 requests a second
MOST_BROKER_MIB = 20.0  # asked for with a million queued
MOST_GROWTH = 1.25  # of a process's memory, from the second quarter of the time to the last
PATIENCE_S = 3_600.0


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 3 * PATIENCE_S)
def test_a_backlog_and_a_soak_lose_nothing_in_flat_memory(
    database_url: str, tiny_model: Path, tmp_path: Path, undisturbed: Answers, note: Note
) -> None:
    with running_system(tmp_path, database_url, tiny_model, environment=HASTE) as system:
        processes = {name: psutil.Process(system.pid(name)) for name in system.services}
        started = time.monotonic()
        held = {"broker's data": partial(broker_bytes, system)}
        with Watch(lambda: families_of(processes), held, shared=False) as watch:
            for _ in range(QUEUED // MOST_ROWS):
                system.submit(MOST_ROWS)
            soak(system, started + SOAK_S)
            system.wait_done(PATIENCE_S)
        verdict = judge(system, undisturbed)
        seconds, memory = time.monotonic() - started, watch.memory()
        broker_mib = memory.pop("broker's data")["peak_mib"]
        peaks = ", ".join(f"{name} {told['peak_mib']:.0f}" for name, told in memory.items())
        said = f"{seconds:.0f} s; peak MiB: {peaks}"
        note(18, "100,000 requests queued, then a soak", 1, verdict, note=said)
        verdict.check(0)
        assert system.restarted.total() == 0, system.restarted
        assert broker_mib < MOST_BROKER_MIB
        growth = {name: told.get("last_over_second_quarter", 1.0) for name, told in memory.items()}
        assert max(growth.values()) < MOST_GROWTH, growth


def broker_bytes(system: System) -> int:
    return int(system.broker.info("memory")["used_memory"])


def soak(system: System, until: float) -> None:
    """A job every few seconds, unless too many are still open."""
    while time.monotonic() < until:
        if len(system.open_jobs()) < QUEUED // MOST_ROWS:
            system.submit(MOST_ROWS)
        pause = time.monotonic() + JOB_EVERY_S
        system.wait_until("the next job", lambda at=pause: time.monotonic() > at)
