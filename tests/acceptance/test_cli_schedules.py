"""`nightjar schedules`, from a file to a history, on its own database."""

import json
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from nightjar.jobs.accounts import Tenant
from nightjar.jobs.schedule_records import RunEnd, RunState
from nightjar.jobs.store import Store
from nightjar.pipeline.front.cli import app
from tests.schedules import Clock, planner

TWO = """
[schedules.rank]
cron = "0 2 * * *"
time_zone = "Asia/Seoul"
task = "rank.toml"
[schedules.describe]
cron = "15 2 * * *"
task = "describe.toml"
"""


@pytest.fixture
def store(
    sqlite_url: str, migrated_sqlite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    shutil.copy(migrated_sqlite_file, sqlite_url.removeprefix("sqlite:///"))
    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", sqlite_url)
    opened = Store(sqlite_url)
    yield opened
    opened.close()


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["schedules", *arguments])


def told(*arguments: str) -> Any:
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_a_file_is_applied_changed_and_pruned(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "schedules.toml"
    path.write_text(TWO)
    assert [one["change"] for one in told("apply", str(path))] == ["created", "created"]
    path.write_text(TWO.replace("15 2 *", "30 2 *"))
    assert [one["change"] for one in told("apply", str(path))] == ["unchanged", "updated"]
    path.write_text(TWO.partition("[schedules.describe]")[0])
    left = call("apply", str(path))
    assert (left.exit_code, "--prune deletes them" in left.stderr) == (0, True)
    assert [one["change"] for one in told("apply", str(path), "--prune")] == [
        "unchanged",
        "deleted",
    ]
    changed = told("changes")
    assert [(one["name"], one["action"]) for one in changed] == [
        ("describe", "deleted"),
        ("describe", "updated"),
        ("describe", "created"),
        ("rank", "created"),
    ]
    assert (changed[1]["before"], changed[1]["after"]) == (
        {"cron": "15 2 * * *"},
        {"cron": "30 2 * * *"},
    )
    assert "@" in changed[0]["actor"]
    (listed,) = told("list")
    assert (listed["name"], listed["last_state"]) == ("rank", None)
    assert listed["next_at"].endswith("T02:00:00+09:00")
    path.write_text(TWO.replace("0 2 * * *", "0 0 2 * * *"))
    assert call("apply", str(path)).exit_code == 2


def test_schedules_are_steered_and_watched(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "schedules.toml"
    path.write_text(TWO)
    told("apply", str(path))
    assert told("pause", "rank")["next_at"] is None
    assert "paused" in call("list").stdout
    made = told("run-now", "rank")
    again = call("run-now", "rank")
    assert (again.exit_code, "goes on (waiting)" in again.stderr) == (2, True)
    assert told("resume", "rank")["paused"] is False
    assert told("show", "rank")["last_run"]["id"] == made["id"]
    assert [one["trigger"] for one in told("history", "rank")] == ["manual"]
    assert "manual" in call("history", "rank").stdout
    assert told("delete", "rank")["deleted"] is True
    assert call("show", "rank").exit_code == 2
    assert call("list", "--tenant", "nobody").exit_code == 2
    store.accounts.create_tenant(Tenant("owls"))
    assert told("list", "--tenant", "owls") == []
    assert json.loads(call("schema").stdout)["required"] == ["schedules"]


def test_check_tells_of_failures_and_of_what_stands_still(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "schedules.toml"
    path.write_text(TWO)
    told("apply", str(path))
    assert (call("check").exit_code, told("check")) == (0, [])
    moment = store.schedule_runs.clock()
    schedule = store.schedules.find("default", "rank")
    for number in range(3):
        store.schedule_runs.run_now(
            "default", schedule.id, "test", moment - timedelta(hours=number)
        )
        claimed = store.schedule_work.claim("runner", moment)
        assert claimed is not None
        store.schedule_work.finish(claimed, RunEnd(RunState.FAILED, "no rows"), moment)
        assert call("check").exit_code == (3 if number == 2 else 0)
    assert "its last 3 runs have failed (from 3 on); the last: no rows" in call("check").stdout
    told("delete", "rank")
    clock = Clock(moment + timedelta(days=1))
    late = store.schedules.find("default", "describe")
    store.schedule_runs.move_next(late, moment - timedelta(minutes=6))
    assert "no planner has seen it" in call("check").stdout
    planner(store, clock).step()
    waiting = store.schedule_runs.newest(late.id, 1)[0]
    assert waiting.state is RunState.WAITING
