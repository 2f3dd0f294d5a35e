"""The same faults done to plain Celery, to stand beside Nightjar's in the table.

Nothing is asserted of what Celery loses or repeats: it is counted. What is asserted is that the
count itself is right: an undisturbed run has none.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.plain import QUEUE, THREADS, PlainSystem, plain_system
from tests.faults.report import Row
from tests.faults.test_garbage import RAW

pytestmark = pytest.mark.slow
Strike = Callable[[PlainSystem, random.Random], None]


def kill_worker(system: PlainSystem, rng: random.Random) -> None:
    time.sleep(rng.uniform(0, 1))
    system.restart("worker")


def kill_broker(system: PlainSystem, rng: random.Random) -> None:
    time.sleep(rng.uniform(0, 1))
    system.restart("broker")


def flush(system: PlainSystem, rng: random.Random) -> None:
    time.sleep(rng.uniform(0, 1))
    system.broker.flushall()


def drop_connections(system: PlainSystem, _: random.Random) -> None:
    """With idle slots: two long tasks for four threads."""
    system.submit(THREADS // 2, seconds=3.0)
    system.let_pass(1.0)
    system.broker.client_kill_filter(_type="normal", skipme=True)
    system.let_pass(4.0)


def fill_broker(system: PlainSystem, _: random.Random) -> None:
    system.broker.config_set("maxmemory", "1")
    system.let_pass(15.0)
    system.broker.config_set("maxmemory", "0")


def send_garbage(system: PlainSystem, _: random.Random) -> None:
    for raw in RAW:
        system.broker.lpush(QUEUE, raw)
    system.let_pass(5.0)


def terminate_worker(system: PlainSystem, _: random.Random) -> None:
    process = system.services["worker"].process
    assert process is not None
    process.terminate()
    process.wait(60)
    system.start("worker")


FAULTS: dict[str, tuple[int, str, int, Strike]] = {
    "killed": (1, "worker SIGKILL at random times", 20, kill_worker),
    "broker": (5, "broker SIGKILL, nothing kept", 10, kill_broker),
    "flushed": (6, "FLUSHALL", 10, flush),
    "dropped": (7, "CLIENT KILL with idle slots", 10, drop_connections),
    "full": (9, "broker at maxmemory for 15 s", 5, fill_broker),
    "garbage": (16, "garbage and stale messages in the queues", len(RAW), send_garbage),
    "rolling": (19, "TERM in a rolling restart", 6, terminate_worker),
}


def row(system: PlainSystem, url: str, number: int, fault: str, times: int) -> Row:
    kind = "SQLite" if url.startswith("sqlite") else "PostgreSQL"
    note = "; ".join(f"{name} ended {n} times" for name, n in sorted(system.ended.items()))
    return Row(number, fault, "plain Celery", kind, times, **system.figures(), note=note)


def test_an_undisturbed_run_counts_nothing(tmp_path: Path, database_url: str) -> None:
    with plain_system(tmp_path, database_url) as system:
        system.submit(40)
        system.wait_done()
        found = row(system, database_url, 0, "none", 0)
    assert (found.requests, found.lost, found.twice, found.recomputed) == (40, 0, 0, 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_plain_celery_loses_is_counted(
    fault: str,
    database_url: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    number, name, times, strike = FAULTS[fault]
    rng = random.Random(number)
    with plain_system(tmp_path, database_url) as system:
        for _ in range(1 if strike is send_garbage else times):
            if strike is not drop_connections:
                system.wait_until_working()
            strike(system, rng)
        system.wait_done()
        found = row(system, database_url, number, name, times)
    record_property("fault", found.as_json())
    assert found.requests > 0
    assert 0 <= found.lost <= found.requests
