"""`nightjar bill`: the costs of jobs, by tenant and by schedule."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa

from nightjar.jobs.accounts import Tenant
from nightjar.jobs.schedule_records import RunEnd, RunState
from nightjar.jobs.store import Store
from nightjar.jobs.store.schedule_tables import schedule_run
from nightjar.jobs.tallies import ComputeCost
from tests.jobs import planned, submit_for
from tests.outcomes import answers, claim
from tests.processes import nightjar_here
from tests.schedules import Clock, add_schedule

COST = ComputeCost(0.5, 12.0, 3, 0, 0, "fp32", "1.0")


@pytest.fixture(autouse=True)
def database(store: Store, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", database_url)


def computed(store: Store, rows: int = 2) -> str:
    job_id, (ref,) = planned(store, rows, each=rows)
    claimed = claim(store, ref)
    assert store.leases.finish(ref.id, ref.epoch, "worker", answers(claimed), cost=COST)
    return job_id


def told(*arguments: str) -> dict[str, Any]:
    done = nightjar_here("bill", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_jobs_of_a_tenant_and_their_sum(store: Store) -> None:
    store.accounts.create_tenant(Tenant("owls"))
    first, second = computed(store), computed(store, 3)
    submit_for(store, "owls", 4)
    found = told()
    assert [one["job"] for one in found["jobs"]] == [second, first]
    assert [one["rows_computed"] for one in found["jobs"]] == [3, 2]
    report = store.reports.of_job(second).as_json()["bill"]
    assert found["jobs"][0] == {"job": second, "complete": True} | {
        name: report[name] for name in found["total"]
    }
    assert found["total"]["decoded_tokens"] == 2 * 5
    assert found["total"]["cached_tokens"] == 6
    assert found["total"]["engine_s"] == 1.0
    assert [one["job"] for one in told("--last", "1")["jobs"]] == [second]
    assert told("--tenant", "owls")["total"]["rows_computed"] == 0
    assert told("--tenant", "nobody")["jobs"] == []


def test_the_runs_of_a_schedule(store: Store) -> None:
    computed(store)  # of no schedule
    schedule = add_schedule(store, Clock(datetime.now(UTC)), "rank", task_name="rank")
    moment = datetime.now(UTC)
    store.schedule_runs.run_now("default", schedule.id, "test", moment)
    run = store.schedule_work.claim("test", moment)
    assert run is not None
    job_id = computed(store)
    name_job(store, run.run.id, job_id)
    assert store.schedule_work.finish(run, RunEnd(RunState.SUCCEEDED, total=2, completed=2), moment)
    store.schedule_runs.run_now(
        "default", schedule.id, "test", datetime.now(UTC)
    )  # without a job yet
    found = told("--schedule", "rank")
    assert [one["job"] for one in found["jobs"]] == [job_id]
    shown = nightjar_here("bill", "--schedule", "rank")
    assert shown.stdout.splitlines()[-1].split()[:3] == ["1", "jobs", "2"]
    missing = nightjar_here("bill", "--schedule", "none")
    assert missing.returncode == 2
    assert "none" in missing.stderr


def name_job(store: Store, run_id: str, job_id: str) -> None:
    """As the task runner does once it has submitted."""
    named = sa.update(schedule_run).where(schedule_run.c.id == run_id).values(job_id=job_id)
    store.database.write(lambda connection: connection.execute(named))
