"""The same faults done to plain Celery, to stand beside Nightjar's in the table.

Nothing is asserted of what Celery loses or repeats: it is counted. What is asserted is that the
count itself is right: an undisturbed run has none.
"""

import math
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.clocks import WrongClock
from tests.faults.garbage import RAW
from tests.faults.locking import locked
from tests.faults.plain import QUEUE, THREADS, PlainSystem, plain_system
from tests.faults.plain_app import BACK_AFTER_S
from tests.faults.postgres import PrivatePostgres, private_postgres
from tests.faults.report import Row

pytestmark = pytest.mark.slow
Strike = Callable[[PlainSystem, random.Random], None]
TABLES = ("celery_taskmeta",)
POISONS = {333: "hang", 700: "raise", 1_333: "memory", 1_700: "crash"}
HOUR_S = 3_600
PAUSE_MS = 120_000


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
    system.signal("worker", signal.SIGTERM)
    process = system.services["worker"].process
    assert process is not None
    process.wait(60)
    system.start("worker")


def lose_a_pop(system: PlainSystem, _: random.Random) -> None:
    """The broker answers a worker that stands still and waits for a message; then it is killed."""
    for _ in range(30):
        landed = system.landed()
        system.submit(1)  # when it has landed the worker is up
        while system.landed() == landed:
            system.let_pass(0.5)
        system.let_pass(2.0)
        system.signal("worker", signal.SIGSTOP)
        system.submit(1)
        popped = not system.broker.llen(QUEUE)
        system.restart("worker")
        if popped:
            return
    raise AssertionError("the worker never waited at the broker")


def kill_before_acknowledgement(system: PlainSystem, _: random.Random) -> None:
    """The broker takes no more writes until a task has landed and the worker is killed."""
    system.broker.client_pause(PAUSE_MS, all=False)
    landed = system.landed()
    while system.landed() == landed:
        system.let_pass(0.05)
    system.kill("worker")
    system.broker.client_unpause()
    system.start("worker")


def kill_before_commit(system: PlainSystem, _: random.Random) -> None:
    with locked(system.url, TABLES):
        system.let_pass(3.0)
        system.kill("worker")
    system.start("worker")


def stop_broker(system: PlainSystem, _: random.Random) -> None:
    system.signal("broker", signal.SIGSTOP)
    system.let_pass(60.0)
    system.signal("broker", signal.SIGCONT)


def take_broker_away(system: PlainSystem, _: random.Random) -> None:
    system.kill("broker")
    system.let_pass(60.0)
    system.start("broker")


def lock_database(system: PlainSystem, _: random.Random) -> None:
    with locked(system.url, TABLES):
        system.let_pass(60.0)


def stop_worker(system: PlainSystem, _: random.Random) -> None:
    """Until another one has been given what it had."""
    if "second" not in system.services:
        system.add_worker("second")
        system.start("second")
    system.signal("worker", signal.SIGSTOP)
    system.let_pass(BACK_AFTER_S + 5.0)
    system.signal("worker", signal.SIGCONT)


def set_clock(system: PlainSystem, _: random.Random) -> None:
    """Of one of two workers: an hour ahead, an hour behind, right again."""
    clock = WrongClock(system.journal.parent, "second")
    system.add_worker("second", clock.environment)
    system.start("second")
    for shift in (0, HOUR_S, -HOUR_S, 0):
        clock.shift(shift)
        system.wait_until_working()
        system.let_pass(5.0)


def poison(system: PlainSystem, _: random.Random) -> None:
    for n in range(2_000):
        system.submit_text(f"<poison:{POISONS[n]}>" if n in POISONS else f"row {n}", 0.0)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done, by its number and name in Nightjar's table.

    calls: how often `strike` is called to do it so many `times`; as often unless said.
    while_working: the worker has tasks whenever it is called.
    patience_s: how long to wait for the last outcome, where some come back for ever.
    """

    number: int
    name: str
    times: int
    strike: Strike
    calls: int | None = None
    while_working: bool = True
    patience_s: float = math.inf


FAULTS = {
    "killed": Fault(1, "worker SIGKILL at random times", 20, kill_worker),
    "popped": Fault(
        2,
        "worker killed between the broker's pop and its note",
        3,
        lose_a_pop,
        while_working=False,
        patience_s=120,
    ),
    "committed": Fault(
        3, "worker killed after commit, before acknowledgement", 5, kill_before_acknowledgement
    ),
    "uncommitted": Fault(
        4, "worker killed after computing, before its commit", 5, kill_before_commit
    ),
    "broker": Fault(5, "broker SIGKILL, nothing kept", 10, kill_broker),
    "flushed": Fault(6, "FLUSHALL", 10, flush),
    "dropped": Fault(7, "CLIENT KILL with idle slots", 10, drop_connections, while_working=False),
    "frozen": Fault(8, "broker SIGSTOP for 60 s", 1, stop_broker),
    "gone": Fault(8, "no broker for 60 s", 1, take_broker_away),
    "full": Fault(9, "broker at maxmemory for 15 s", 5, fill_broker),
    "locked": Fault(11, "database locked 60 s by another writer", 1, lock_database),
    "stopped": Fault(14, "worker SIGSTOP past its lease, then CONT", 5, stop_worker),
    "clock": Fault(15, "a process's clock an hour ahead, an hour behind", 3, set_clock, calls=1),
    "garbage": Fault(
        16, "garbage and stale messages in the queues", len(RAW), send_garbage, calls=1
    ),
    "poison": Fault(
        17,
        "poison, 1 request in 1,000",
        4,
        poison,
        calls=1,
        while_working=False,
        patience_s=300,
    ),
    "rolling": Fault(19, "TERM in a rolling restart", 6, terminate_worker),
}


def suffer(system: PlainSystem, fault: Fault) -> Row:
    """Do it, and count what became of the tasks."""
    rng = random.Random(fault.number)
    for _ in range(fault.calls or fault.times):
        if fault.while_working:
            system.wait_until_working()
        fault.strike(system, rng)
    system.wait_done(fault.patience_s)
    return row(system, fault)


def row(system: PlainSystem, fault: Fault) -> Row:
    kind = "SQLite" if system.url.startswith("sqlite") else "PostgreSQL"
    figures = system.figures()
    note = [f"{name} ended {n} times" for name, n in sorted(system.ended.items())]
    if system.stood_still:
        note.append(f"worker stood still {system.stood_still} times and was killed")
    if math.isfinite(fault.patience_s) and figures["lost"]:
        note.append(f"lost: not ended {fault.patience_s:.0f} s later")
    name, times = fault.name, fault.times
    return Row(fault.number, name, "plain Celery", kind, times, **figures, note="; ".join(note))


def test_an_undisturbed_run_counts_nothing(tmp_path: Path, database_url: str) -> None:
    with plain_system(tmp_path, database_url) as system:
        system.submit(40)
        system.wait_done()
        found = system.figures()
    assert found == {"requests": 40, "lost": 0, "twice": 0, "recomputed": 0}


@pytest.mark.parametrize("name", FAULTS)
def test_what_plain_celery_loses_is_counted(
    name: str,
    database_url: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    with plain_system(tmp_path, database_url) as system:
        found = suffer(system, FAULTS[name])
    record_property("fault", found.as_json())
    assert found.requests > 0
    assert 0 <= found.lost <= found.requests


@pytest.fixture
def postgres() -> Iterator[PrivatePostgres]:
    with private_postgres() as server:
        yield server


def test_what_plain_celery_loses_with_postgresql_is_counted(
    postgres: PrivatePostgres, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    def kill_database(system: PlainSystem, rng: random.Random) -> None:
        system.let_pass(rng.uniform(0, 1))
        postgres.kill()
        system.let_pass(rng.uniform(0, 1))
        postgres.start()

    fault = Fault(10, "PostgreSQL killed in mid-write", 10, kill_database)
    with postgres.fresh_database() as url, plain_system(tmp_path, url) as system:
        found = suffer(system, fault)
    record_property("fault", found.as_json())
    assert found.requests > 0
    assert 0 <= found.lost <= found.requests
