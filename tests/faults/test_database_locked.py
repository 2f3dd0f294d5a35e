"""Somebody holds the database's write lock for longer than a transaction waits for it."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from nightjar.jobs.store.database import database_url as usable_url
from nightjar.jobs.store.tables import metadata
from tests.faults.conftest import Note
from tests.faults.oracle import Answers, judge
from tests.faults.system import running_system

ROWS = 600


@contextmanager
def locked(url: str, tables: Iterable[str] = tuple(metadata.tables)) -> Iterator[None]:
    """Nobody else writes into these tables within the block; readers go on."""
    parsed = usable_url(url)
    is_sqlite = parsed.get_backend_name() == "sqlite"
    options = {"connect_args": {"timeout": 60}} if is_sqlite else {}
    engine = sa.create_engine(parsed, poolclass=sa.NullPool, **options)
    with engine.connect() as connection:
        if is_sqlite:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            _lock(connection, tables)
        yield
        connection.rollback()


def _lock(connection: sa.Connection, tables: Iterable[str]) -> None:
    """Tables are locked one after another, so a transaction that writes into them in another order
    may wait for this one, and this one for it: PostgreSQL ends one of the two."""
    names = ", ".join(sorted(tables))
    for left in reversed(range(10)):
        try:
            connection.exec_driver_sql(f"LOCK TABLE {names} IN EXCLUSIVE MODE")
        except sa.exc.OperationalError:
            connection.rollback()
            if not left:
                raise
        else:
            return


# Longer than a worker may be silent; and longer than SQLite (30 s) waits for the lock.
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [12, 60])
def test_a_database_locked_by_another_writer(
    tmp_path: Path,
    database_url: str,
    tiny_model: Path,
    undisturbed: Answers,
    note: Note,
    seconds: int,
) -> None:
    with running_system(tmp_path, database_url, tiny_model) as system:
        job_id = system.submit(ROWS)
        system.wait_until("results", lambda: system.store.jobs.get(job_id).ended)
        with locked(database_url):
            held = system.store.jobs.get(job_id).ended
            released = time.monotonic() + seconds
            while time.monotonic() < released:
                assert system.store.jobs.get(job_id).ended == held  # and readers do not wait
                time.sleep(0.2)
        back = system.wait_until("results", lambda: system.store.jobs.get(job_id).ended > held)
        system.wait_done()
        verdict = judge(system, undisturbed)
        what = f"database locked {seconds} s by another writer"
        note(11, what, 1, verdict, recovery_s=back, note="results land again")
        # Nobody died: the silence was the database's.
        verdict.check(0)
        assert system.restarted.total() == 0, system.restarted
