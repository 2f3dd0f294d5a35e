"""Planner, dispatcher and sweeper (one process) are killed at each of their steps, and anywhere."""

import random
import time
from pathlib import Path

import pytest

from nightjar.jobs.records import NewJob
from nightjar.jobs.states import JobState
from nightjar.pipeline.queue.commands import PLANNER_APP
from tests.faults.conftest import Note
from tests.faults.load import wait_until_working
from tests.faults.oracle import Answers, answers, judge, most_in_flight
from tests.faults.rows import request_rows
from tests.faults.stepwise import STEPS
from tests.faults.system import HASTE, PLANNER, STEADY, System, running_system

SMALL_CHUNKS = HASTE | STEADY | {"NIGHTJAR_PLAN_CHUNK_REQUESTS": "64"}


@pytest.mark.slow
def test_the_planner_killed_at_every_step(
    database_url: str, tiny_model: Path, tmp_path: Path, undisturbed: Answers, note: Note
) -> None:
    died = tmp_path / "died"
    died.mkdir()

    def step(system: System) -> None:
        planner = system.services[PLANNER]
        planner.command = [
            "tests.faults.stepwise" if word == PLANNER_APP else word for word in planner.command
        ]

    def missing(*steps: str) -> set[str]:
        return {*steps} - {path.name for path in died.iterdir()}

    environment = SMALL_CHUNKS | {"NIGHTJAR_TEST_STEPS": str(died)}
    with running_system(
        tmp_path, database_url, tiny_model, environment=environment, prepare=step
    ) as system:
        wait_until_working(system, "worker-0")
        system.restart("worker-0")  # its leases are taken back
        suspecting = {name for name in STEPS if "suspect" in name}
        system.wait_until("suspects", lambda: not missing(*suspecting))
        while missing("before requeue", "after requeue"):
            wait_until_working(system, "worker-0")
            system.broker.flushall()
            dispatched = set(system.store.planning.dispatched())
            system.wait_until(
                "lost messages",
                lambda lost=dispatched: not lost & set(system.store.planning.dispatched()),
            )
        expiring = submit_with_deadline(system, 1.0)
        system.wait_until("its end", lambda: system.store.jobs.get(expiring).is_over)
        system.wait_until("every step", lambda: not missing(*STEPS))
        # The last of them may kill a planner when all work is done; it is started again.
        system.wait_until("its start", lambda: system.restarted[PLANNER] == len(STEPS))
        system.wait_done()
        verdict = judge(system, undisturbed)
        note(13, "planner, dispatcher, sweeper killed at every step", len(STEPS), verdict)
        # Only the worker that was killed had computed in vain.
        verdict.check(most_in_flight(system))
        assert system.restarted == {PLANNER: len(STEPS)}
        check_expired(system, expiring, undisturbed)


@pytest.mark.slow
def test_the_planner_killed_at_random_times(
    database_url: str, tiny_model: Path, tmp_path: Path, undisturbed: Answers, note: Note
) -> None:
    rng, times = random.Random(13), 30
    with running_system(tmp_path, database_url, tiny_model, environment=SMALL_CHUNKS) as system:
        for _ in range(times):
            if len(system.open_jobs()) < 2:
                system.submit(400)
            landed = sum(job.ended for job in system.open_jobs())
            if rng.random() < 0.3:  # else a kill may come while the planner still starts
                system.wait_until(
                    "results",
                    lambda at=landed: sum(job.ended for job in system.open_jobs()) != at,
                )
            time.sleep(rng.uniform(0, 4))
            system.restart(PLANNER)
        system.wait_done()
        verdict = judge(system, undisturbed)
        note(13, "planner, dispatcher, sweeper killed at random times", times, verdict)
        verdict.check(0)  # the worker lived


@pytest.mark.slow
def test_one_of_two_planners_killed_at_random_times(
    database_url: str, tiny_model: Path, tmp_path: Path, undisturbed: Answers, note: Note
) -> None:
    """Both plan; what the dead one had taken goes to the other."""
    rng, times, kills = random.Random(31), 12, 0
    with running_system(tmp_path, database_url, tiny_model, environment=SMALL_CHUNKS) as system:
        planners = [PLANNER, system.start_another(PLANNER)]
        planned: set[str] = set()
        # On a busy machine a planner may be killed a few times before it has planned anything.
        while kills < times or (planned != set(planners) and kills < 5 * times):
            kills += 1
            if len(system.open_jobs()) < 2:
                system.submit(400)
            time.sleep(rng.uniform(0, 3))
            # A log begins anew with its process.
            planned |= {name for name in planners if "action=plan_chunk" in system.log(name)}
            system.restart(rng.choice(planners))
        system.wait_done()
        assert planned == set(planners)
        verdict = judge(system, undisturbed)
        note(31, "one of two planners that share jobs killed", kills, verdict)
        verdict.check(0)  # the worker lived


def submit_with_deadline(system: System, seconds: float) -> str:
    """A job of which most will expire; it is not among the jobs that must be answered."""
    with system.store.jobs.submit(NewJob("tiny", completion_window_s=seconds)) as submission:
        submission.add(request_rows(1_000))
    return submission.job_id


def check_expired(system: System, job_id: str, undisturbed: Answers) -> None:
    """Every row has one outcome: the undisturbed answer, or that it has expired."""
    job, found = system.store.jobs.get(job_id), answers(system.store, job_id)
    assert (job.state, len(found), job.ended) == (JobState.EXPIRED, 1_000, 1_000)
    computed = {name: answer for name, answer in found.items() if answer[0] != "failed"}
    assert computed == {name: undisturbed[name] for name in computed}
    assert (len(computed), job.cancelled) == (job.completed, 1_000 - job.completed)
    codes = {answer[1][0] for answer in found.values() if answer[0] == "failed"}
    assert codes == {"expired"}
