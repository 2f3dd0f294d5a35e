"""`nightjar top` over real databases, in real terminals and without one."""

import os
import signal
from pathlib import Path

import pytest

from nightjar.jobs.errors import StoreError, StoreUnavailableError
from nightjar.jobs.states import JobState
from nightjar.jobs.store import Store, job_listing
from nightjar.jobs.workers import ComputeSeconds
from nightjar.pipeline.front.top.reading import rates, take
from tests.faults.postgres import private_postgres
from tests.jobs import planned, submit_for
from tests.outcomes import claim, compute
from tests.processes import NIGHTJAR, nightjar_here, wait_until
from tests.query_plans import explained, whole_reads
from tests.terminals import ALTERNATE, BACK, in_terminal

STATUS = {
    "host": "gpu-1",
    "pid": 7,
    "models": [{"name": "tiny", "prefill_tokens": 40, "decode_tokens": 2}],
    "micro_batch_count": 1,
}


def filled(store: Store) -> tuple[str, str]:
    """A job that runs and one that waits, a worker; the ids of the jobs."""
    running, refs = planned(store, 6, each=2)
    compute(store, refs[0])
    claim(store, refs[1])
    waiting = submit_for(store, "owls", 3)
    store.heartbeats.beat("gpu-1:7:ab", ComputeSeconds(), STATUS)
    return running, waiting


@pytest.mark.every_database
def test_a_picture_tells_what_is_stored(store: Store) -> None:
    running, waiting = filled(store)
    over = submit_for(store, "owls", 1)
    store.stopping.cancel(over)
    with explained(store) as statements:
        found = take(store)
    assert [(one.id, one.ended, one.total) for one in found.jobs] == [
        (running, 2, 6),
        (waiting, 0, 3),
    ]
    assert (found.depths.jobs, found.depths.rows) == (2, 7)
    assert [one.status["host"] for one in found.workers] == ["gpu-1"]
    if store.database.is_sqlite:  # PostgreSQL reads small tables whole
        assert [plan for _, plan in statements if whole_reads(plan)] == []
    assert rates(None, found).rows[running] > 0


def test_open_jobs_come_running_ones_first_and_up_to_a_bound(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [submit_for(store, tenant, 1) for tenant in ("a", "b", "c")]
    paused = submit_for(store, "a", 1)
    store.stopping.pause(paused)
    running, refs = planned(store, 2)
    claim(store, refs[0])
    ids = [one.id for one in store.listing.unfinished(10)]
    assert ids == [running, *reversed(made), paused]
    assert [one.id for one in store.listing.unfinished(2)] == ids[:2]
    assert store.listing.unfinished(10)[-1].state is JobState.PAUSED
    monkeypatch.setattr(job_listing, "SEARCHED_JOBS", 0)
    assert store.listing.unfinished(10) == []


def test_without_a_terminal_one_picture_is_printed(
    store: Store, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, waiting = filled(store)
    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", database_url)
    for options in ((), ("--once",)):
        done = nightjar_here("top", *options)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
        for shown in (running, waiting, "33.3%", "gpu-1:7", "open jobs: 2", "rows left: 7"):
            assert shown in done.stdout, shown


def test_a_database_that_does_not_answer_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", "postgresql://owl@127.0.0.1:1/nightjar")
    with pytest.raises(StoreUnavailableError, match="the database is not available"):
        nightjar_here("top")
    assert nightjar_here("top", "--every", "0").returncode == 2


def environment(url: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NIGHTJAR_")}
    root = str(Path(__file__).parents[2])
    return kept | {"NIGHTJAR_DATABASE_URL": url, "PYTHONPATH": root, "LC_ALL": "C.UTF-8"}


def test_in_a_terminal_it_renews_itself_until_ctrl_c(sqlite_tables: str) -> None:
    store = Store(sqlite_tables)
    running, waiting = filled(store)
    command = [*NIGHTJAR, "top", "--every", "0.5"]
    with in_terminal(command, 60, 20, environment(sqlite_tables)) as terminal:
        at = terminal.wait_for(running)
        assert ALTERNATE in terminal.text
        store.stopping.cancel(waiting)
        at = terminal.wait_for("open jobs: 1", at)
        later = submit_for(store, "owls", 2)
        terminal.wait_for(later, at)
        assert terminal.end(signal.SIGINT) == 0
    assert terminal.text.count(BACK) == terminal.text.count(ALTERNATE) == 1
    assert "Traceback" not in terminal.text
    store.close()


@pytest.mark.slow
def test_a_database_that_goes_away_is_told_until_it_is_back() -> None:
    with private_postgres() as server, server.fresh_database() as url:
        store = Store(url)
        store.migrate()
        running, _ = filled(store)
        command = [*NIGHTJAR, "top", "--every", "0.5"]
        with in_terminal(command, 200, 20, environment(url)) as terminal:
            at = terminal.wait_for(running)
            server.kill()
            at = terminal.wait_for("not renewed: the database is not available", at)
            at = terminal.wait_for(running, at)  # the last picture stays
            server.start()
            wait_until("the database", lambda: answers(store))
            later = submit_for(store, "owls", 2)
            terminal.wait_for(later, at)
            assert terminal.end(signal.SIGTERM) == 0
        assert terminal.text.count(BACK) == 1
        store.close()


def answers(store: Store) -> bool:
    try:
        store.ping()
    except StoreError:
        return False
    return True
