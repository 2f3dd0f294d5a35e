"""How the planner worker ends: its passes first, then its lead."""

import os
import subprocess
import sys
from pathlib import Path

from nightjar.jobs.store import Store
from nightjar.pipeline.queue.leadership import PLANNER
from tests.processes import wait_until

# What Celery tells the planner at its start and its end, without a broker in between.
PLANNER_PROCESS = """
import sys, time
from celery import signals
import nightjar.pipeline.planning.tasks
signals.worker_init.send(None)
sys.stdin.readline()
signals.worker_shutdown.send(None)
time.sleep(0.4)  # a sweep would take the lead again
"""


def test_no_pass_goes_on_after_the_lead_is_resigned(sqlite_url: str, tiny_model: Path) -> None:
    store = Store(sqlite_url)
    store.migrate()
    settings = {
        "NIGHTJAR_DATABASE_URL": sqlite_url,
        "NIGHTJAR_MODEL": str(tiny_model),
        "NIGHTJAR_SWEEP_EVERY_S": "0.05",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", PLANNER_PROCESS],
        env=os.environ | settings,
        stdin=subprocess.PIPE,
    )
    try:
        wait_until("the lead", lambda: store.leaders.get(PLANNER), 60)
        process.communicate(b"end\n", timeout=60)
        assert process.returncode == 0
        left = store.leaders.get(PLANNER)
        assert left is not None
        assert left.owner is None
    finally:
        process.kill()
        process.wait()
        store.close()
