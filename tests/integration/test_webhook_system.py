"""The API, a planner and a receiver as they run: a job that ends is an event that arrives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
from standardwebhooks import Webhook

from nightjar.jobs.store import Store
from tests.api_process import running_api
from tests.processes import wait_until
from tests.receivers import receiving

# What Celery tells the planner at its start and its end, without a broker in between.
PLANNER_PROCESS = """
import sys
from celery import signals
import nightjar.pipeline.planning.tasks
signals.worker_init.send(None)
sys.stdin.readline()
signals.worker_shutdown.send(None)
"""


def test_an_event_arrives_from_the_planner(
    sqlite_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    store = Store(sqlite_url)
    store.migrate()
    store.close()
    allowed = {"NIGHTJAR_WEBHOOK_ALLOW_PRIVATE": "true"}
    settings = {
        **allowed,
        "NIGHTJAR_DATABASE_URL": sqlite_url,
        "NIGHTJAR_MODEL": str(tiny_model),
        "NIGHTJAR_SWEEP_EVERY_S": "0.1",
    }
    with (
        receiving() as receiver,
        running_api(sqlite_url, tiny_model, tmp_path, **allowed) as api,
    ):
        made = httpx.post(f"{api.url}/v1/webhooks", json={"url": receiver.url}).json()
        # Every line is refused, so the job ends as it lands: neither broker nor worker is needed.
        job = httpx.post(f"{api.url}/v1/jobs", content=b"no line", timeout=60).json()
        assert (job["state"], job["rejected"]) == ("failed", 1)
        planner = subprocess.Popen(
            [sys.executable, "-c", PLANNER_PROCESS],
            env=os.environ | settings,
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        try:
            wait_until("the event", lambda: receiver.received, 60)
            url = f"{api.url}/v1/webhooks/{made['id']}/deliveries"
            wait_until("its outcome", lambda: _first(url)["state"] == "delivered", 30)
            planner.communicate(b"end\n", timeout=60)
            assert planner.returncode == 0
        finally:
            planner.kill()
            planner.wait()
    (got,) = receiver.received
    event = Webhook(made["secret"]).verify(got.body, got.headers)
    assert (event["type"], event["data"]["id"]) == ("job.failed", job["id"])
    log = (tmp_path / "api.log").read_text()
    assert made["secret"].removeprefix("whsec_") not in log


def _first(url: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(httpx.get(url).text)["data"][0]
    return found
