"""How the planner worker ends: its passes first, then its lead."""

import json
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


# Each pass makes one step: beside a leader that plans otherwise, beside one that plans alike, and
# as the leader.
STEPS = """
import json, sys, time
from nightjar.jobs.store import Store
from nightjar.pipeline.planning import tasks
from nightjar.pipeline.planning.ingest import IngestReport
from nightjar.pipeline.queue.leadership import PLANNER, PROTOCOL

done = []

class Spy:
    plans_with = '{"dtype": "int8"}'
    def plan_next(self):
        done.append("plan")
        return 0
    def pause_s(self):
        return None

def spy(name, gives):
    class One(Spy):
        def step(self):
            done.append(name)
            return gives
        def drop(self):
            done.append("drop")
    return One

tasks._planner = Spy
tasks._ingest = spy("ingest", IngestReport(False, 1.0))
tasks._finalizer = spy("finalize", False)
tasks._delivering = spy("deliver", 1.0)
tasks.dispatch = lambda *_: done.append("dispatch") or 0

def steps():
    done.clear()
    for step in ("plan", "dispatch", "ingest", "finalize", "deliver"):
        getattr(tasks, f"_{step}_step")()
    return list(done)

store = Store(tasks.settings.database_url.get_secret_value())
leaders = store.leaders
other = leaders.take(PLANNER, "other", None, PROTOCOL)
tasks._leadership().check()
leaders.renew(other)
tasks._leadership().check()
stands_by = []
for said in ('{"dtype": "bf16"}', Spy.plans_with):
    store.planners.beat("other", said)
    tasks._agreement().look(tasks._leadership().other)
    stands_by.append(steps())
leaders.resign(other)
assert tasks._leadership().check()
print(json.dumps([*stands_by, steps()]))
"""


def test_who_stands_by_takes_no_step_of_the_leaders(sqlite_url: str, tiny_model: Path) -> None:
    store = Store(sqlite_url)
    store.migrate()
    store.close()
    settings = {"NIGHTJAR_DATABASE_URL": sqlite_url, "NIGHTJAR_MODEL": str(tiny_model)}
    done = subprocess.run(
        [sys.executable, "-c", STEPS],
        env=os.environ | settings,
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    steps = ["plan", "dispatch", "ingest", "finalize", "deliver"]
    assert json.loads(done.stdout) == [["drop"], ["plan", "drop"], steps]
