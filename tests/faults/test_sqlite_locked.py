"""Another program holds SQLite's write lock for longer than anybody waits for it."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.faults.conftest import Note
from tests.faults.oracle import Answers, judge
from tests.faults.system import running_system

ROWS = 600


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    return sqlite_url


# Longer than a worker may be silent; and longer than a transaction waits (30 s).
@pytest.mark.parametrize("seconds", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_sqlite_locked_by_another_writer(
    tmp_path: Path,
    database_url: str,
    tiny_model: Path,
    undisturbed: Answers,
    note: Note,
    seconds: int,
) -> None:
    path = database_url.removeprefix("sqlite:///")
    with (
        running_system(tmp_path, database_url, tiny_model) as system,
        closing(sqlite3.connect(path, isolation_level=None, timeout=60)) as other,
    ):
        job_id = system.submit(ROWS)
        system.wait_until("results", lambda: system.store.job(job_id).ended)
        other.execute("BEGIN IMMEDIATE")
        held = system.store.job(job_id).ended
        released = time.monotonic() + seconds
        while time.monotonic() < released:
            assert system.store.job(job_id).ended == held  # and readers do not wait
            time.sleep(0.2)
        other.execute("COMMIT")
        back = system.wait_until("results", lambda: system.store.job(job_id).ended > held)
        system.wait_done()
        verdict = judge(system, undisturbed)
        assert system.restarted.total() == 0, system.restarted
        # Nobody died: the silence was the database's.
        verdict.check(0)
        what = f"SQLite locked {seconds} s by another writer"
        note(11, what, 1, verdict, recovery_s=back, note="results land again")
