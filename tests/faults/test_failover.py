"""Faults 29 and 30: the broker's master or PostgreSQL's primary dies for good; another goes on."""

from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from nightjar.jobs.errors import StoreUnavailableError
from tests.faults.conftest import Note, Place
from tests.faults.load import is_moving, outcomes, seconds_to_move, wait_until_working
from tests.faults.oracle import Answers, judge, most_in_flight
from tests.faults.standby import primary_and_standby
from tests.faults.system import BROKER, System, running_system
from tests.sentinels import replicated_broker

pytestmark = pytest.mark.slow
BACK_S = 30.0


def test_a_replica_of_the_broker_is_promoted(place: Place) -> None:
    with replicated_broker() as broker:

        def prepare(system: System) -> None:
            del system.services[BROKER]
            system.environment |= broker.environment

        with place.system(prepare=prepare) as system:
            wait_until_working(system, "worker-0")
            broker.kill_master()
            system.wait_until("what was in flight", lambda: not system.leases("worker-0"))
            back_s = seconds_to_move(system)
            system.wait_done()
            said = "Sentinel promotes the replica; until a message through it was computed"
            fault = "broker's master killed for good"
            verdict = place.judge(system, 29, fault, 1, recovery_s=back_s, note=said)
            verdict.check(most_in_flight(system))
            assert broker.was_promoted()
            assert back_s < BACK_S


def have_landed(system: System, before: int) -> bool:
    """Whether requests have ended since there were so many; False while no server answers."""
    with suppress(StoreUnavailableError):
        return is_moving(system, before)
    return False


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_standby_of_postgresql_is_promoted(
    tmp_path: Path, tiny_model: Path, undisturbed: Answers, note: Note
) -> None:
    with primary_and_standby() as (primary, standby):
        url = standby.fresh_database()
        with running_system(tmp_path, url, tiny_model) as system:
            wait_until_working(system, "worker-0")
            before = outcomes(system)
            primary.kill()
            standby.promote()
            back_s = system.wait_until("results", partial(have_landed, system, before))
            system.wait_done()
            verdict = judge(system, undisturbed)
            said = "a synchronous standby is promoted; the URL names both hosts"
            fault = "PostgreSQL's primary killed for good"
            note(30, fault, 1, verdict, recovery_s=back_s, note=said)
            verdict.check(most_in_flight(system))
            assert system.restarted.total() == 0, system.restarted
            assert back_s < BACK_S
