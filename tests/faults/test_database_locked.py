"""Somebody holds the database's write lock for longer than a transaction waits for it."""

import time
from pathlib import Path

import pytest

from tests.faults.conftest import Note
from tests.faults.locking import locked
from tests.faults.oracle import Answers, judge
from tests.faults.system import running_system

ROWS = 600


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
