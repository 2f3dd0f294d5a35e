"""Fault 19: TERM, one process after the other, under load."""

import time

import pytest

from tests.faults.conftest import Place
from tests.faults.load import wait_until_working
from tests.faults.oracle import most_in_flight
from tests.faults.system import BEAT, HASTE, PLANNER, STEADY, System

pytestmark = pytest.mark.slow
ROUNDS = 3


def replace(system: System, name: str) -> float:
    """TERM, wait for the end, start again; returns the seconds until it had ended."""
    started = time.monotonic()
    system.terminate(name)
    system.wait_until(f"{name} to end", lambda: not system.is_running(name))
    seconds = time.monotonic() - started
    process = system.services[name].process
    assert process is not None
    assert process.returncode == 0, system.logs()
    system.start(name)
    return seconds


def test_a_rolling_restart_loses_and_recomputes_nothing(place: Place) -> None:
    drains_s = []
    with place.system(workers=2) as system:
        for _ in range(ROUNDS):
            for name in system.workers:
                wait_until_working(system, name)
                drains_s.append(replace(system, name))
            for name in (PLANNER, BEAT):
                wait_until_working(system, *system.workers)
                replace(system, name)
        system.wait_done()
        verdict = place.judge(
            system,
            19,
            "TERM in a rolling restart",
            ROUNDS * 4,
            recovery_s=max(drains_s),
            note="longest drain of a worker",
        )
        verdict.check(0)


def make_suspects(system: System, name: str) -> None:
    """Kill a worker's compute process; what it had in flight is now to be computed alone."""
    wait_until_working(system, name)
    process = system.compute_process(name)
    assert process is not None
    process.kill()
    system.wait_until("a suspect", lambda: any(ref.isolated for ref in system.leases(name)))


def test_a_worker_ends_soon_while_suspects_wait_for_their_turn(place: Place) -> None:
    """Steps of 3 s: the suspects of one crash alone would take longer than the one in hand."""
    times, drains_s = 3, []
    slow = HASTE | STEADY | {"NIGHTJAR_FAKE_STEP_S": "3"}
    with place.system(environment=slow) as system:
        for _ in range(times):
            make_suspects(system, "worker-0")
            drains_s.append(replace(system, "worker-0"))
        system.wait_done()
        not_begun = system.log("worker-0").count("not begun: the worker ends")
        verdict = place.judge(
            system,
            19,
            "TERM while suspects wait for their turn",
            times,
            recovery_s=max(drains_s),
            note=f"longest drain; {not_begun} micro-batches left to the next worker",
        )
        verdict.check(times * most_in_flight(system))  # by the crashes
        assert not_begun > 0


def test_a_worker_that_cannot_finish_gives_its_leases_back(place: Place) -> None:
    """Its compute process hangs, which alone would be noticed after two minutes."""
    times, drains_s = 3, []
    with place.system(environment=HASTE | STEADY | {"NIGHTJAR_DRAIN_S": "2"}) as system:
        for _ in range(times):
            wait_until_working(system, "worker-0")
            process = system.compute_process("worker-0")
            assert process is not None
            process.suspend()
            drains_s.append(replace(system, "worker-0"))
        system.wait_done()
        given_back = system.log("worker-0").count("given back")
        suspects = system.log("worker-0").count("suspect request")
        verdict = place.judge(
            system,
            19,
            "TERM while the compute process hangs, grace of 2 s",
            times,
            recovery_s=max(drains_s),
            note=f"longest drain; {given_back} leases given back",
        )
        verdict.check(times * most_in_flight(system))
        assert given_back >= times
        assert suspects == 0
