"""Faults 5 to 9: the broker dies, forgets, drops connections, hangs, or is full."""

import random
import time
from collections.abc import Callable

import pytest

from tests.faults.conftest import Place
from tests.faults.load import let_pass, seconds_to_move, wait_until_working
from tests.faults.oracle import most_in_flight
from tests.faults.system import BROKER, HASTE, STEADY, System

pytestmark = pytest.mark.slow
AWAY_S = 60.0
FULL_S = 15.0


def forget(system: System) -> None:
    system.broker.flushall()


def die(system: System) -> None:
    system.restart(BROKER)


@pytest.mark.parametrize(
    ("number", "fault", "strike"),
    [(5, "broker SIGKILL, nothing kept", die), (6, "FLUSHALL", forget)],
    ids=["killed", "flushed"],
)
def test_a_broker_that_loses_all_it_has_costs_nothing(
    number: int, fault: str, strike: Callable[[System], None], place: Place
) -> None:
    times, waits_s, rng = 10, [], random.Random(number)
    with place.system() as system:
        for _ in range(times):
            wait_until_working(system, "worker-0")
            time.sleep(rng.uniform(0, 1))
            strike(system)
            # What is in flight lands first; the next claim needs the broker.
            system.wait_until("what was in flight to land", lambda: not system.leases("worker-0"))
            waits_s.append(seconds_to_move(system))
        system.wait_done()
        note = "until a message sent anew was computed"
        verdict = place.judge(system, number, fault, times, recovery_s=max(waits_s), note=note)
        verdict.check(times * most_in_flight(system))


def test_dropped_connections_with_idle_slots_compute_nothing_twice(place: Place) -> None:
    times = 10
    with place.system(environment=HASTE | STEADY | {"NIGHTJAR_FAKE_STEP_S": "3"}) as system:
        for _ in range(times):
            # Two micro-batches of completions and one of rankings for four slots.
            wait_until_working(system, "worker-0", rows=16)
            system.broker.client_kill_filter(_type="normal", skipme=True)
            system.wait_done()
        skipped = system.log("worker-0").count("'outcome': 'skipped'")
        note = f"{skipped} second deliveries skipped"
        place.judge(system, 7, "CLIENT KILL with idle slots", times, note=note).check(0)
        assert skipped > 0


def freeze(system: System) -> None:
    system.freeze(BROKER)
    let_pass(system, AWAY_S)
    system.thaw(BROKER)


def take_away(system: System) -> None:
    system.kill(BROKER)
    let_pass(system, AWAY_S)
    system.start(BROKER)


@pytest.mark.parametrize(
    ("fault", "strike"),
    [("broker SIGSTOP for 60 s", freeze), ("no broker for 60 s", take_away)],
    ids=["frozen", "gone"],
)
def test_a_broker_that_is_away_for_a_minute_is_waited_for(
    fault: str, strike: Callable[[System], None], place: Place
) -> None:
    with place.system() as system:
        wait_until_working(system, "worker-0")
        strike(system)
        waited_s = seconds_to_move(system)
        system.wait_done()
        note = "from its return to the next outcome"
        verdict = place.judge(system, 8, fault, 1, recovery_s=waited_s, note=note)
        verdict.check(most_in_flight(system))


def test_a_full_broker_is_waited_for(place: Place) -> None:
    times, waits_s, fault = 5, [], f"broker at maxmemory for {FULL_S:.0f} s"
    with place.system() as system:
        for _ in range(times):
            wait_until_working(system, "worker-0")
            system.broker.config_set("maxmemory", "1")
            let_pass(system, FULL_S)
            system.broker.config_set("maxmemory", "0")
            waits_s.append(seconds_to_move(system))
        system.wait_done()
        note = "from the first free byte to the next outcome"
        verdict = place.judge(system, 9, fault, times, recovery_s=max(waits_s), note=note)
        verdict.check(times * most_in_flight(system))
        assert not system.restarted
