"""Faults 24 and 25: database or broker stand behind a network that is silent for a while.

Nobody is told: packets are still acknowledged, connections are still taken. What was sent before
the silence arrives after it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import httpx
import pytest

from nightjar.jobs.store import postgres
from tests.faults.api import API, answers_http, give_api
from tests.faults.conftest import Place
from tests.faults.load import (
    let_pass,
    outcomes,
    rows_in_flight,
    seconds_to_move,
    wait_until_taken_over,
    wait_until_working,
)
from tests.faults.oracle import most_in_flight
from tests.faults.rows import batch_file
from tests.faults.system import BEAT, PLANNER, System
from tests.freezing_proxy import FreezingProxy, proxied_postgres
from tests.services import free_port

pytestmark = pytest.mark.slow
ON_POSTGRES = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
# Longer than the longest wait for an answer (a statement's), and longer than the broker's client
# waits (30 s).
DATABASE_SILENT_S = postgres.STATEMENT_LIMIT_S + 25
BROKER_SILENT_S = 60.0
ANSWERED_WITHIN_S = 20.0
RECOVERED_WITHIN_S = 60.0  # asked for on a busy machine
ROWS = 300
JSONL = {"content-type": "application/jsonl"}


def give(system: System, names: tuple[str, ...], variables: dict[str, str]) -> None:
    """Let these services have other settings; before they start."""
    for name in names:
        system.services[name].environment = {**system.services[name].environment, **variables}


def status_of(url: str) -> tuple[int, float, dict[str, str]]:
    """What /health says, after how many seconds, and what it says of each part."""
    asked = time.monotonic()
    answer = httpx.get(f"{url}/health", timeout=60)
    return answer.status_code, time.monotonic() - asked, answer.json()["parts"]


@ON_POSTGRES
def test_a_silent_database_is_waited_for_by_everybody(place: Place) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with proxied_postgres(place.database_url) as (proxy, through):

        def prepare(system: System) -> None:
            give_api(port, system)
            silent = {"NIGHTJAR_DATABASE_URL": through}
            give(system, (API, PLANNER, BEAT, *system.workers), silent)

        with place.system(workers=2, prepare=prepare) as system:
            system.wait_until("the API", lambda: answers_http(url))
            wait_until_working(system, *system.workers)
            proxy.freeze()
            frozen = time.monotonic()
            time.sleep(5)  # what had passed lands
            before = outcomes(system)
            status, health_s, parts = status_of(url)
            let_pass(system, DATABASE_SILENT_S - (time.monotonic() - frozen))
            stood_still = outcomes(system) == before
            proxy.thaw()
            moved_s = seconds_to_move(system)
            api_s = system.wait_until("the API", lambda: answers_http(url))
            taken = httpx.post(f"{url}/v1/jobs", headers=JSONL, content=batch_file(40), timeout=60)
            system.jobs.append(taken.json()["id"])
            system.wait_done()
            verdict = place.judge(
                system,
                24,
                f"database silent for {DATABASE_SILENT_S:.0f} s behind a network that stands still",
                1,
                recovery_s=moved_s,
                note=f"from its return to the next outcome; /health said 503 after {health_s:.1f} "
                f"s, 200 {moved_s + api_s:.1f} s after its return",
            )
            verdict.check(most_in_flight(system, workers=2))
            assert stood_still
            assert (status, parts["database"] != "ok") == (503, True)
            assert health_s < ANSWERED_WITHIN_S
            assert moved_s + api_s < RECOVERED_WITHIN_S
            assert not system.restarted
            check_logs(system)


def check_logs(system: System) -> None:
    """Everybody said that the database was away, and nobody was surprised."""
    for name in (API, PLANNER, *system.workers):
        assert "not available" in system.log(name) or "no answer" in system.log(name), name
        assert "Traceback" not in system.log(name), system.log(name)


@ON_POSTGRES
def test_a_worker_that_falls_silent_in_a_transaction_stops_nobody(place: Place) -> None:
    """It holds the locks of a landing when its packets stop; the server hears of no end."""
    with proxied_postgres(place.database_url) as (proxy, through):

        def prepare(system: System) -> None:
            give(system, ("worker-0",), {"NIGHTJAR_DATABASE_URL": through})

        with place.system(workers=2, prepare=prepare) as system:
            silent, other = system.workers
            wait_until_working(system, silent, other, rows=4 * ROWS)
            proxy.freeze_after(b"UPDATE job SET")
            system.wait_until("a landing", lambda: proxy.is_frozen)
            struck = time.monotonic()
            ids, owner = rows_in_flight(system, silent), system.owner(silent)
            moved_s = seconds_to_move(system)
            taken_s = wait_until_taken_over(system, ids, owner) + moved_s
            let_pass(system, DATABASE_SILENT_S - (time.monotonic() - struck))
            proxy.thaw()
            wait_until_working(system, silent)
            system.wait_done()
            verdict = place.judge(
                system,
                24,
                "one worker's way to the database silent, within a transaction",
                1,
                recovery_s=taken_s,
                note="until all that it had in flight ran elsewhere; the others' next outcome "
                f"after {moved_s:.1f} s",
            )
            verdict.check(most_in_flight(system))
            assert ids
            assert taken_s < RECOVERED_WITHIN_S
            assert not system.restarted


@contextmanager
def proxied_broker() -> Iterator[FreezingProxy]:
    """A proxy whose target is known when the system is made."""
    with FreezingProxy(("127.0.0.1", 1)) as proxy:
        yield proxy


def test_a_silent_broker_is_waited_for_and_jobs_are_taken_meanwhile(place: Place) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with proxied_broker() as proxy:

        def prepare(system: System) -> None:
            proxy.target = str(system.private / "broker.sock")
            give_api(port, system)
            silent = {"NIGHTJAR_BROKER_URL": f"redis://127.0.0.1:{proxy.port}/0"}
            give(system, (API, PLANNER, BEAT, *system.workers), silent)

        with place.system(prepare=prepare) as system:
            system.wait_until("the API", lambda: answers_http(url))
            wait_until_working(system, "worker-0")
            proxy.freeze()
            frozen = time.monotonic()
            taken = httpx.post(f"{url}/v1/jobs", headers=JSONL, content=batch_file(40), timeout=60)
            taken_s = time.monotonic() - frozen
            system.jobs.append(taken.json()["id"])
            let_pass(system, BROKER_SILENT_S - taken_s)
            status, health_s, parts = status_of(url)
            proxy.thaw()
            moved_s = seconds_to_move(system)
            system.wait_done()
            said_ok_s = system.wait_until("its sign", partial(broker_is_seen, url))
            verdict = place.judge(
                system,
                25,
                f"broker silent for {BROKER_SILENT_S:.0f} s behind a network that stands still",
                1,
                recovery_s=moved_s,
                note="from its return to the next outcome; a job sent meanwhile was taken after "
                f"{taken_s:.1f} s",
            )
            verdict.check(most_in_flight(system))
            assert (taken.status_code, status) == (201, 200)
            assert "does not answer" in parts["broker"]
            assert max(taken_s, health_s) < ANSWERED_WITHIN_S
            assert max(moved_s, said_ok_s) < RECOVERED_WITHIN_S
            assert not system.restarted


def broker_is_seen(url: str) -> bool:
    """Whether /health says that the broker answers."""
    return status_of(url)[2]["broker"] == "ok"
