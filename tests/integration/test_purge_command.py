"""`nightjar purge`, on both databases: what it says, what it asks, and a process that is killed."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner, Result

from nightjar.jobs.api import create_app
from nightjar.jobs.purge_records import PurgeScope
from nightjar.jobs.store import Store
from nightjar.pipeline.front.cli import app
from tests.bulk_jobs import finished_job, results_kept
from tests.jobs import planned
from tests.processes import start_nightjar, wait_until

ROWS = 8_000


@pytest.fixture
def store(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store that the command works on; another job holds the newest rows."""
    url = store.database.url.render_as_string(hide_password=False)
    monkeypatch.setenv(
        "NIGHTJAR_DATABASE_URL", url.replace("+pysqlite", "").replace("+psycopg", "")
    )
    return store


def call(*arguments: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, ["purge", *arguments], input=typed)


def told(*arguments: str) -> Any:
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_it_says_what_will_go_and_what_went(store: Store) -> None:
    old, young = finished_job(store, 150, days=40), finished_job(store, 250, days=20)
    planned(store, 1)
    counts = {"jobs": 1, "rows": 150, "begun_before": 0}
    dry = told("--older-than", "30d", "--dry-run")
    assert {name: dry[name] for name in counts} == counts
    assert (dry["dry_run"], [one["id"] for one in dry["first"]]) == (True, [old])
    assert store.jobs.get(old).purged_at is None
    refused = call("--older-than", "30d")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"{old}  default  ended 2" in refused.stderr
    assert "to purge: 1 jobs with 150 rows; 0 purges go on" in refused.stderr
    assert "no terminal to ask at; add --yes" in refused.stderr
    assert told("--older-than", "30d", "--yes") == {"dry_run": False} | counts
    assert store.jobs.get(old).purged_at is not None
    assert store.jobs.get(young).purged_at is None
    done = call("--older-than", "30d", "--yes")
    assert done.stdout == "to purge: 0 jobs with 0 rows; 0 purges go on\n"
    done = call("--job", young, "--yes")
    assert done.stdout == "purged 1 jobs; 250 rows were deleted\n"
    again = call("--job", young, "--yes")
    assert (again.exit_code, again.stdout) == (0, "")
    assert "were purged at 2" in again.stderr


def test_without_an_age_it_follows_the_retention(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = finished_job(store, 100, days=40)
    planned(store, 1)
    assert told("--yes")["jobs"] == 0
    monkeypatch.setenv("NIGHTJAR_KEEP_RESULTS_DAYS", "30")
    assert told("--tenant", "default", "--yes") == {
        "dry_run": False,
        "jobs": 1,
        "rows": 100,
        "begun_before": 0,
    }
    assert store.jobs.get(old).purged_at is not None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--older-than", "soon"], "'soon' is no span of time"),
        (["--tenant", "owls"], "no tenant 'owls'"),
        (["--job", "job_1"], "there is no job 'job_1'"),
    ],
)
def test_what_cannot_be_done_is_told(
    sqlite_tables: str, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", sqlite_tables)
    done = call(*arguments, "--yes")
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr


def test_a_job_that_runs_is_refused(store: Store) -> None:
    job_id, _ = planned(store, 1)
    done = call("--job", job_id, "--yes")
    assert done.exit_code == 2
    assert f"{job_id} is queued: only a job that is over can be purged" in done.stderr


def test_a_purge_that_is_killed_is_never_half_visible_and_goes_on(
    store: Store, tmp_path: Path
) -> None:
    """Before the mark all of it can be read; behind the mark nothing, however much is deleted."""
    job_id = finished_job(store, ROWS, days=40)
    planned(store, 1)
    client = TestClient(create_app(store, lambda _: None, served_model="tiny"))
    url = f"/v1/jobs/{job_id}"

    def left() -> int:
        return results_kept(store, job_id)

    assert left() == ROWS
    purge = start_nightjar("purge", "--older-than", "30d", "--yes", log=tmp_path / "purge.log")
    try:
        deadline = time.monotonic() + 60
        seen = set()
        while (rows := left()) == ROWS and time.monotonic() < deadline:
            seen.add(client.get(f"{url}/results", params={"limit": 1}).status_code)
        assert rows < ROWS, (tmp_path / "purge.log").read_text(encoding="utf-8")
        purge.send_signal(signal.SIGKILL)
    finally:
        purge.kill()
        assert purge.wait(30) == -signal.SIGKILL
    assert 0 < left() < ROWS
    assert seen <= {200, 410}
    for path in ("/results", "/output", "/errors", "/results?order=landed"):
        answer = client.get(f"{url}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "results_purged")
    shown = client.get(url).json()
    assert shown["purged_at"] is not None
    assert (shown["counts"]["completed"], shown["state"]) == (ROWS, "completed")
    begun = told("--dry-run")
    assert (begun["jobs"], begun["begun_before"]) == (0, 1)
    went = told("--yes")
    assert (went["jobs"], went["begun_before"], left()) == (0, 1, 0)
    wait_until("the end", lambda: store.purging.marked(PurgeScope()) == [], 10)
