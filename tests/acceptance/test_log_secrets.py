"""No log of a deployment repeats a prompt, an answer, a key or a password, also where parts fail.

The short test of this, with JSON logs over SQLite, is in `test_monitoring.py`.
"""

import json
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.journeys import (
    BROKER_PASSWORD,
    DATABASE_PASSWORD,
    PLANTED,
    Journey,
    assert_nothing_secret,
    journey_in,
    save_chat_model,
)
from tests.monitored import COMMANDS, Monitored
from tests.processes import wait_until
from tests.tasks import write_rows, write_task

pytestmark = pytest.mark.slow
PROCESSES = {
    *("api", "uploads", "planner", "gpu-worker", "compute", "beat", "flower", "task-runner"),
}
SINK = '[parameters]\nmax_tokens = 4\n[sink]\nparquet = "answers.parquet"'


def run_task(system: Monitored, folder: Path) -> None:
    """A task whose rows are planted, by the task runner; and one that it cannot read."""
    rows = {"id": [1, 2], "review": [PLANTED["prompt"], PLANTED["document"]]}
    write_rows(folder, rows)
    write_task(folder, more=SINK)
    (folder / "broken.toml").write_text(f"[source\n{PLANTED['badline']}", encoding="utf-8")
    with system.client as client:
        for name, state in (("task", "succeeded"), ("broken", "failed")):
            path = f"/v1/schedules/{name}"
            fields = {"cron": "0 2 * * *", "time_zone": "UTC", "task": f"{name}.toml"}
            client.put(path, json=fields).raise_for_status()
            client.post(f"{path}/run").raise_for_status()

            def is_over(path: str = path, state: str = state) -> bool:
                runs = client.get(f"{path}/runs").raise_for_status().json()["data"]
                return bool(runs) and runs[0]["state"] == state

            wait_until(f"the run of {name}", is_over, 60)


def lose_the_broker(journey: Journey) -> None:
    """The messages of a lost connection name the broker; each process that uses it writes one."""
    system = journey.system
    before = {name: len(system.log(name)) for name in ("planner", "gpu-worker", "beat")}
    system.services["broker"].stop(10)
    with system.client as client:  # the API wakes the planner through it
        row = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
        line = json.dumps({**row, "body": {"prompt": PLANTED["prompt"], "max_tokens": 2}})
        client.post("/v1/jobs", content=line)
    for name, size in before.items():
        wait_until(f"the complaint of {name}", lambda n=name, s=size: len(system.log(n)) > s, 60)


@pytest.mark.parametrize("format_", ["text", "json"])
def test_no_process_writes_what_is_secret(tmp_path: Path, postgres_url: str, format_: str) -> None:
    model = save_chat_model(tmp_path)
    # The server of the tests lets its user in whatever the password is.
    url = sa.make_url(postgres_url).set(drivername="postgresql", password=DATABASE_PASSWORD)
    tasks = tmp_path / "tasks" / "default"  # of the tenant
    tasks.mkdir(parents=True)
    for journey in journey_in(
        tmp_path,
        url.render_as_string(hide_password=False),
        model,
        tuple(COMMANDS),
        NIGHTJAR_LOG_FORMAT=format_,
        NIGHTJAR_TASK_FOLDER=str(tasks.parent),
    ):
        run_task(journey.system, tasks)
        lose_the_broker(journey)
        journey.system.stop()
        assert_nothing_secret(journey)
        texts = {name: journey.system.log(name) for name in COMMANDS}
        assert all(texts.values()), texts
        assert journey.job_id in texts["gpu-worker"]
        if format_ == "json":
            lines = "".join(texts.values()).splitlines()
            assert {json.loads(line)["process"] for line in lines} >= PROCESSES


def test_what_is_planted_would_be_found(tmp_path: Path) -> None:
    """The check itself: each secret in any one log fails it."""
    for secret in (*PLANTED.values(), BROKER_PASSWORD, DATABASE_PASSWORD, "whsec_1", "an answer"):
        system = Monitored(tmp_path, "key", "sqlite://", services={"api": None})  # type: ignore[dict-item]
        (tmp_path / "api.log").write_text(f"something {secret} something", encoding="utf-8")
        with pytest.raises(AssertionError):
            assert_nothing_secret(Journey(system, "job", ["an answer"], ["whsec_1"], {}, list))
