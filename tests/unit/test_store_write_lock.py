"""SQLite's write lock: a single call gets it soon after other processes."""

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from nightjar.jobs.errors import StoreUnavailableError
from nightjar.jobs.store import database
from nightjar.jobs.store.database import Database


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    opened = Database(f"sqlite:///{tmp_path / 'test.db'}")
    opened.write(lambda connection: connection.execute(sa.text("CREATE TABLE seen (n INTEGER)")))
    yield opened
    opened.close()


def insert(db: Database, *, live: bool) -> None:
    db.write(
        lambda connection: connection.execute(sa.text("INSERT INTO seen VALUES (1)")), live=live
    )


def test_a_call_writes_soon_after_another_process_has_written(db: Database, tmp_path: Path) -> None:
    late: list[float] = []
    with closing(
        sqlite3.connect(tmp_path / "test.db", isolation_level=None, check_same_thread=False)
    ) as other:
        for held_s in (0.3, 0.4, 0.5):
            other.execute("BEGIN IMMEDIATE")
            ended: list[float] = []

            def end(ended: list[float] = ended) -> None:
                other.execute("COMMIT")
                ended.append(time.monotonic())

            timer = threading.Timer(held_s, end)
            timer.start()
            insert(db, live=True)
            now = time.monotonic()
            timer.join()
            late.append(now - ended[0])
    # An ordinary writer asks every 0.1 s by then.
    assert min(late) < 0.05
    insert(db, live=False)
    with db.reading() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM seen")) == 4


def test_a_lock_that_is_held_for_too_long_is_an_error(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 100)
    with closing(sqlite3.connect(tmp_path / "test.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match="locked"):
            insert(db, live=True)
        other.execute("COMMIT")
    insert(db, live=True)
