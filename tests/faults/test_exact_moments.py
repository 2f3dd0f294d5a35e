"""Faults 2 to 4: a worker is killed at the very moments where Celery loses or repeats work."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import sqlalchemy as sa

from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.store.database import database_url as usable_url
from tests.faults.conftest import Place
from tests.faults.load import carries_micro_batches, wait_until_working
from tests.faults.oracle import most_in_flight
from tests.faults.system import System

pytestmark = pytest.mark.slow
WORKER = "worker-0"
ROWS = 40
WAITS_AGAIN_S = 0.5
PAUSE_MS = 120_000
COMPUTED_S = 3.0  # far longer than a step


def take_messages(system: System) -> list[tuple[bytes, bytes]]:
    """Take all messages of micro-batches off their lists; each with its list's key."""
    taken = []
    for key in system.broker.scan_iter():
        while carries_micro_batches(key) and (raw := system.broker.rpop(key)):
            taken.append((key, raw))
    return taken


def lose_pop(system: System) -> tuple[bool, int]:
    """Let the broker answer a worker that stands still and waits for a message, and kill it.

    That message is on no list any more, and the worker has not noted it. Returns whether it is so,
    which it is not if the worker did not wait at that moment, and the requests it died with: on a
    slow machine a message may have been sent after the others were taken away.
    """
    system.freeze(WORKER)
    job = system.submit(ROWS)
    sent = MicroBatchState.DISPATCHED
    system.wait_until("a message", lambda: system.store.jobs.get_in_detail(job)[1][sent])
    taken = take_messages(system)
    system.thaw(WORKER)
    time.sleep(WAITS_AGAIN_S)
    system.freeze(WORKER)
    lost = False
    for key, raw in taken:
        system.broker.lpush(key, raw)
        lost = lost or not system.broker.llen(key)
    held = sum(ref.size for ref in system.leases(WORKER))
    system.restart(WORKER)
    return lost, held


def test_a_worker_killed_between_the_pop_and_its_note(place: Place) -> None:
    wanted, times, claimed, waits_s = 3, 0, 0, []
    with place.system() as system:
        for _ in range(10 * wanted):
            # One job first: the worker is up and waits at the broker.
            system.submit(1)
            system.wait_done()
            lost, held = lose_pop(system)
            claimed += held
            if lost:
                times += 1
                waits_s.append(system.wait_done())
            if times == wanted:
                break
        system.wait_done()
        verdict = place.judge(
            system,
            2,
            "worker killed between the broker's pop and its note",
            times,
            recovery_s=max(waits_s, default=None),
            note="until the lost message's requests had ended, with the worker's start",
        )
        verdict.check(claimed)  # nobody had claimed what was lost
        assert times == wanted


def is_done(system: System, ids: list[int]) -> bool:
    """Whether one of these micro-batches has ended."""
    held = {ref.id for ref in system.leases(WORKER)}
    return any(id_ not in held for id_ in ids)


def copies(system: System) -> list[tuple[bytes, bytes]]:
    """The messages of micro-batches that wait; each with its list's key."""
    keys = [key for key in system.broker.scan_iter() if carries_micro_batches(key)]
    return [(key, raw) for key in keys for raw in system.broker.lrange(key, 0, -1)]


def test_a_worker_killed_after_its_commit_and_messages_that_come_twice(place: Place) -> None:
    """The broker may bring back what was taken: it may be restored from a file, for instance."""
    times, again = 5, 0
    with place.system() as system:
        for _ in range(times):
            wait_until_working(system, WORKER)
            kept = copies(system)
            system.broker.client_pause(PAUSE_MS, all=False)  # the broker takes no more writes
            ids = [ref.id for ref in system.leases(WORKER)]
            if not ids:  # they have landed meanwhile
                ids = [0]
            system.wait_until("a commit", lambda ids=ids: is_done(system, ids))
            system.kill(WORKER)
            system.broker.client_unpause()
            system.start(WORKER)
            system.wait_done()
            for key, raw in kept:
                system.broker.rpush(key, raw)
            again += len(kept)
            system.wait_until("the second deliveries", lambda: not copies(system))
        system.wait_until(
            "their end", lambda: system.log(WORKER).count("'outcome': 'skipped'") >= again
        )
        skipped = system.log(WORKER).count("'outcome': 'skipped'")
        verdict = place.judge(
            system,
            3,
            "worker killed after commit, before acknowledgement",
            times,
            note=f"{again} messages came a second time, {skipped} were skipped",
        )
        verdict.check(times * most_in_flight(system))
        assert again >= times


@contextmanager
def nobody_can_write(url: str) -> Iterator[None]:
    """Hold what a worker needs to land its results."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30)) as writer:
            writer.isolation_level = None
            writer.execute("BEGIN IMMEDIATE")
            yield
            writer.execute("ROLLBACK")
        return
    engine = sa.create_engine(usable_url(url), poolclass=sa.NullPool)
    with engine.connect() as connection, connection.begin() as transaction:
        connection.execute(sa.text("LOCK TABLE result IN ACCESS EXCLUSIVE MODE"))
        yield
        transaction.rollback()


def test_a_worker_killed_after_computing_and_before_its_commit(place: Place) -> None:
    times, computed = 5, 0
    with place.system() as system:
        for _ in range(times):
            wait_until_working(system, WORKER)
            with nobody_can_write(place.database_url):
                time.sleep(COMPUTED_S)
                computed += sum(ref.size for ref in system.leases(WORKER))
                system.kill(WORKER)
            system.start(WORKER)
        system.wait_done()
        verdict = place.judge(
            system,
            4,
            "worker killed after computing, before its commit",
            times,
            note=f"{computed} answers that could not land",
        )
        verdict.check(times * most_in_flight(system))
        assert verdict.recomputed >= computed > 0
