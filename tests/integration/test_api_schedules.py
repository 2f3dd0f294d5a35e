"""Schedules over HTTP: made, changed, steered and watched, as the commands do it."""

import hashlib
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from nightjar.jobs.accounts import NewKey, Tenant
from nightjar.jobs.api import create_app
from nightjar.jobs.file_records import FilePurpose, NewFile
from nightjar.jobs.models import PlannedModel
from nightjar.jobs.schedule_records import FAILING_AFTER, RunEnd, RunState
from nightjar.jobs.schedules.steering import Steering
from nightjar.jobs.states import Scope
from nightjar.jobs.store import Store
from nightjar.jobs.store.schedules import MOST_OF_TENANT
from tests.schedules import Clock, add_schedule, planner

NIGHTLY = {"cron": "0 2 * * *", "time_zone": "Asia/Seoul", "task": "nightly/rank.toml"}
RANK = "/v1/schedules/rank"


@pytest.fixture
def store(sqlite_url: str, migrated_sqlite_file: Path) -> Iterator[Store]:
    shutil.copy(migrated_sqlite_file, sqlite_url.removeprefix("sqlite:///"))
    opened = Store(sqlite_url)
    yield opened
    opened.close()


@pytest.fixture
def client(store: Store) -> Iterator[TestClient]:
    with TestClient(create_app(store, lambda job_id: None)) as opened:
        yield opened


def refusal(answer: Any) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def fail_next_run(store: Store, clock: Clock) -> None:
    claimed = store.schedule_work.claim("runner", clock.now())
    assert claimed is not None
    end = RunEnd(RunState.FAILED, "no row succeeded", 3, 0, 3)
    assert store.schedule_work.finish(claimed, end, clock.now())


def test_a_schedule_is_made_once_and_replaced(client: TestClient, store: Store) -> None:
    first = client.put(RANK, json=NIGHTLY)
    made = first.json()
    assert (first.status_code, made["name"], made["task"]) == (201, "rank", "nightly/rank.toml")
    assert (made["deadline"], made["jitter"], made["keep_results"]) == ("1d", "0s", None)
    assert made["next_at"] == store.schedules.find("default", "rank").next_at.timestamp()
    again = client.put(RANK, json=NIGHTLY)
    assert (again.status_code, again.json()) == (200, made)
    other = client.put(RANK, json={**NIGHTLY, "cron": "30 2 * * *", "jitter": "90m"}).json()
    assert (other["id"], other["cron"], other["jitter"]) == (made["id"], "30 2 * * *", "90m")
    assert client.get(RANK).json() == client.get(f"/v1/schedules/{made['id']}").json() == other
    assert client.get("/v1/schedules").json()["data"] == [other]
    changes = client.get("/v1/schedules/changes").json()["data"]
    assert [one["action"] for one in changes] == ["updated", "created"]
    assert changes[0]["before"] == {"cron": "0 2 * * *", "jitter": "0s"}
    assert changes[0]["after"] == {"cron": "30 2 * * *", "jitter": "90m"}
    assert changes[0]["actor"] == "the API"


def test_some_fields_are_changed_and_the_others_stay(client: TestClient) -> None:
    client.put(RANK, json={**NIGHTLY, "keep_results": "30d", "when_still_running": "queue"})
    changed = client.patch(RANK, json={"priority": 7, "keep_results": None}).json()
    assert (changed["priority"], changed["keep_results"]) == (7, None)
    assert (changed["when_still_running"], changed["task"]) == ("queue", "nightly/rank.toml")
    unchanged = client.patch(RANK, json={}).json()
    assert unchanged == changed
    assert len(client.get("/v1/schedules/changes").json()["data"]) == 2


def test_the_operators_path_is_not_shown_and_stays(client: TestClient, store: Store) -> None:
    add_schedule(store, Clock(), "rank", task_path="/home/operator/rank.toml")
    shown = client.patch(RANK, json={"cron": "5 5 * * *"})
    assert (shown.json()["task"], shown.json()["task_of_operator"]) == (None, True)
    own = store.schedules.find("default", "rank").definition
    assert (own.task_path, own.cron) == ("/home/operator/rank.toml", "5 5 * * *")
    replaced = client.patch(RANK, json={"task": "rank.toml"})
    assert (replaced.json()["task"], replaced.json()["task_of_operator"]) == ("rank.toml", False)
    changes = client.get("/v1/schedules/changes")
    for answer in (shown, replaced, changes):
        assert "/home" not in answer.text


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"cron": "0 0 2 * * *"}, "body.cron", "6 fields"),
        ({"cron": "0 2 30 2 *"}, "body.cron", "never comes"),
        ({"time_zone": "Asia/Soul"}, "body.time_zone", "did you mean Asia/Seoul?"),
        ({"task": "../bats/rank.toml"}, "body.task", "task folder"),
        ({"task": "/etc/rank.toml"}, "body.task", "task folder"),
        ({"task": "rank.txt"}, "body.task", "ends with"),
        ({"task": None}, "body", "exactly one of task and file"),
        ({"jiter": "5m"}, "body.jiter", "did you mean jitter?"),
        ({"jitter": "5 minutes"}, "body.jitter", "a number and s, m, h or d"),
        ({"priority": 10}, "body.priority", "less than or equal to 9"),
        ({"when_still_running": "wait"}, "body.when_still_running", "'queue'"),
        ({"file": "file-1", "task": None}, "body", "needs endpoint"),
        ({"cron": None}, "body.cron", "valid string"),
    ],
)
def test_a_wrong_field_is_named(
    client: TestClient, fields: dict[str, Any], param: str, why: str
) -> None:
    """When a schedule is made, and when one is changed."""
    client.put(RANK, json=NIGHTLY)
    before = client.get(RANK).json()
    for answer in (
        client.put("/v1/schedules/other", json={**NIGHTLY, **fields}),
        client.patch(RANK, json=fields),
    ):
        assert refusal(answer) == (400, "invalid_body", param)
        assert why in answer.json()["error"]["message"]
    assert client.get("/v1/schedules").json()["data"] == [before]


@pytest.mark.parametrize("name", ["check", "changes", "a.b", "x" * 65, "-a"])
def test_a_name_that_cannot_be_is_refused(client: TestClient, name: str) -> None:
    assert client.put(f"/v1/schedules/{name}", json=NIGHTLY).status_code in (400, 404)
    assert client.get("/v1/schedules").json()["data"] == []


def test_a_file_and_its_model_must_be_there(client: TestClient, store: Store) -> None:
    store.accounts.create_tenant(Tenant("bats"))
    store.models.plan_for([PlannedModel("tiny", "f" * 64, 512)])

    def upload(tenant: str, purpose: FilePurpose) -> str:
        file_id = store.files.begin(NewFile(tenant, "in.jsonl", purpose))
        store.files.append(file_id, 0, b"{}\n")
        return store.files.end(file_id, 3, hashlib.sha256(b"{}\n").hexdigest()).id

    body = {"cron": "0 2 * * *", "endpoint": "/v1/completions"}
    foreign = client.put(RANK, json={**body, "file": upload("bats", FilePurpose.BATCH)})
    assert refusal(foreign) == (404, "unknown_file", "body.file")
    mine = {**body, "file": upload("default", FilePurpose.BATCH)}
    assert refusal(client.put(RANK, json={**mine, "model": "huge"}))[:2] == (404, "model_not_found")
    made = client.put(RANK, json={**mine, "model": "tiny"})
    assert (made.status_code, made.json()["file"]) == (201, mine["file"])
    results = upload("default", FilePurpose.BATCH_OUTPUT)
    assert refusal(client.patch(RANK, json={"file": results})) == (400, "invalid_body", "body.file")


def test_a_schedule_is_paused_resumed_run_and_deleted(client: TestClient, store: Store) -> None:
    client.put(RANK, json=NIGHTLY)
    paused = client.post(f"{RANK}/pause").json()
    assert (paused["paused"], paused["next_at"]) == (True, None)
    made = client.post(f"{RANK}/run")
    assert (made.status_code, made.json()["trigger"]) == (201, "manual")
    assert (made.json()["state"], made.json()["counts"]["total"]) == ("waiting", 0)
    assert refusal(client.post(f"{RANK}/run"))[:2] == (409, "wrong_state")
    assert client.get(RANK).json()["last_run"] == made.json()
    assert client.post(f"{RANK}/resume").json()["next_at"] is not None
    assert client.get(f"{RANK}/runs").json()["data"] == [made.json()]
    gone = client.delete(RANK)
    assert gone.json() == {"id": paused["id"], "object": "schedule", "deleted": True}
    assert refusal(client.get(RANK)) == (404, "unknown_schedule", None)
    told = client.get("/v1/schedules/changes", params={"schedule_id": paused["id"]}).json()
    actions = ["deleted", "resumed", "run_now", "paused", "created"]
    assert [one["action"] for one in told["data"]] == actions
    assert store.schedule_runs.open_runs(9) == []


def test_the_check_tells_of_three_failures(client: TestClient, store: Store) -> None:
    clock = Clock(datetime.now(UTC))
    failing = add_schedule(store, clock, "failing")
    client.put(RANK, json=NIGHTLY)
    assert client.get("/v1/schedules/check").json()["ok"] is True
    for _ in range(FAILING_AFTER):
        store.schedule_runs.run_now("default", failing.id, "test", clock.now())
        fail_next_run(store, clock)
        clock.moment += timedelta(days=1)
    told = client.get("/v1/schedules/check").json()
    assert (told["ok"], [one["name"] for one in told["data"]]) == (False, ["failing"])
    assert "no row succeeded" in told["data"][0]["trouble"]
    shown = client.get("/v1/schedules/failing").json()
    assert (shown["failing"], shown["failures"]) == (True, FAILING_AFTER)
    assert shown["last_run"]["counts"] == {"total": 3, "completed": 0, "failed": 3}


def test_pages_of_runs_and_changes_go_on_where_they_ended(client: TestClient, store: Store) -> None:
    schedule, clock = add_schedule(store, Clock(), "rank"), Clock()
    for _ in range(5):
        clock.moment += timedelta(days=1)
        planner(store, clock).step()
        fail_next_run(store, clock)
    runs: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = client.get(f"{RANK}/runs", params={"limit": 2, **after}).json()
        runs += [run["id"] for run in page["data"]]
        if not page["has_more"]:
            break
        after = {"after": page["next_after"]}
    assert runs == [run.id for run in store.schedule_runs.newest(schedule.id, 9)]
    assert len(runs) == 5


def test_the_command_and_the_api_change_the_same_schedule(client: TestClient, store: Store) -> None:
    """Both record who it was."""
    Steering(store, "default", "ada@host").put("rank", add_schedule(store, Clock()).definition)
    store.accounts.create_tenant(Tenant("owls"))
    keys = [
        store.accounts.create_key(NewKey(tenant, Scope.ADMIN)) for tenant in ("default", "owls")
    ]
    with TestClient(create_app(store, lambda job_id: None)) as keyed:
        (own, found), (foreign, _) = keys
        headers = {"Authorization": f"Bearer {own}"}
        assert keyed.post(f"{RANK}/pause", headers=headers).status_code == 200
        other = {"Authorization": f"Bearer {foreign}"}
        assert keyed.post(f"{RANK}/pause", headers=other).status_code == 404
        assert keyed.put(RANK, json=NIGHTLY, headers=other).status_code == 201  # one of its own
        told = keyed.get("/v1/schedules/changes", headers=headers).json()["data"]
    assert [one["actor"] for one in told] == [f"key {found.prefix}", "ada@host", "test"]
    assert store.schedules.find("default", "rank").paused


def test_a_tenant_has_a_bounded_number_of_schedules(client: TestClient, store: Store) -> None:
    for number in range(MOST_OF_TENANT):
        add_schedule(store, Clock(), f"s{number}")
    assert refusal(client.put(RANK, json=NIGHTLY))[:2] == (409, "too_many_schedules")
