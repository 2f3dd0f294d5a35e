"""Fault 1: a GPU worker is killed at random times; fault 14: it is stopped past its lease."""

import random
import time
from pathlib import Path

import pytest

from tests.faults.conftest import Note
from tests.faults.load import rows_in_flight, wait_until_taken_over, wait_until_working
from tests.faults.oracle import Answers, judge, most_in_flight
from tests.faults.system import HASTE, STEADY, running_system

RUNNING_AGAIN_S = 15  # asked for; 5 is the aim


@pytest.mark.parametrize("times", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_workers_killed_at_random_times_lose_nothing(
    times: int,
    database_url: str,
    tiny_model: Path,
    tmp_path: Path,
    undisturbed: Answers,
    note: Note,
) -> None:
    rng = random.Random(1)
    with running_system(tmp_path, database_url, tiny_model, workers=2) as system:
        for kill in range(times):
            name = system.workers[kill % 2]
            wait_until_working(system, name)
            time.sleep(rng.uniform(0, 1))
            system.restart(name)
        recovery_s = system.wait_done()
        verdict = judge(system, undisturbed)
        note(1, "worker SIGKILL", times, verdict, recovery_s=recovery_s, note="until all had ended")
        verdict.check(times * most_in_flight(system))


@pytest.mark.slow
def test_the_work_of_a_killed_worker_runs_again_in_time(
    database_url: str, tiny_model: Path, tmp_path: Path, undisturbed: Answers, note: Note
) -> None:
    """With the product's own times: all that was in flight is in the hands of others."""
    times, waits_s = 5, []
    with running_system(
        tmp_path, database_url, tiny_model, workers=2, environment=STEADY
    ) as system:
        for kill in range(times):
            name, other = system.workers[kill % 2], system.workers[1 - kill % 2]
            wait_until_working(system, name, other)
            ids, owner = rows_in_flight(system, name), system.owner(name)
            system.kill(name)
            waits_s.append(wait_until_taken_over(system, ids, owner))
            system.start(name)
        system.wait_done()
        verdict = judge(system, undisturbed)
        seconds = ", ".join(f"{wait:.1f}" for wait in waits_s)
        note(
            1,
            "worker SIGKILL, default settings",
            times,
            verdict,
            recovery_s=max(waits_s),
            note=f"until all that was in flight ran again: {seconds} s",
        )
        verdict.check(times * most_in_flight(system))
        assert max(waits_s) <= RUNNING_AGAIN_S


@pytest.mark.slow
def test_a_worker_stopped_past_its_lease_has_its_results_thrown_away(
    database_url: str, tiny_model: Path, tmp_path: Path, undisturbed: Answers, note: Note
) -> None:
    times = 5
    slow = HASTE | STEADY | {"NIGHTJAR_FAKE_STEP_S": "1"}
    with running_system(tmp_path, database_url, tiny_model, workers=2, environment=slow) as system:
        for stop in range(times):
            name = system.workers[stop % 2]
            wait_until_working(system, name)
            owner = system.owner(name)
            system.freeze(name)
            ids = rows_in_flight(system, name)
            wait_until_taken_over(system, ids, owner)
            system.thaw(name)
        system.wait_done()
        thrown = sum(system.log(name).count("thrown away") for name in system.workers)
        verdict = judge(system, undisturbed)
        note(
            14,
            "worker SIGSTOP past its lease, then CONT",
            times,
            verdict,
            note=f"{thrown} micro-batches thrown away",
        )
        verdict.check(times * most_in_flight(system))
        assert thrown >= times
