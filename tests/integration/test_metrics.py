"""The metrics of the API over a real store: what they say, who may read, what a scrape reads."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from nightjar.jobs.accounts import NewKey
from nightjar.jobs.api import create_app
from nightjar.jobs.api.health import OK
from nightjar.jobs.models import PlannedModel
from nightjar.jobs.states import Scope
from nightjar.jobs.store import Store, depths
from nightjar.jobs.workers import ComputeSeconds
from nightjar.pipeline.front.api_metrics import READ_EVERY_S, ApiMetrics, observe_request
from tests.jobs import planned, submit
from tests.outcomes import compute
from tests.scrapes import labels, scrape


class Parts:
    """A deployment whose planner is missing."""

    def parts(self) -> Mapping[str, str]:
        return {"broker": OK, "planner": "no planner"}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(store: Store, tmp_path: Path, clock: Clock) -> ApiMetrics:
    return ApiMetrics(store, Parts(), tmp_path / "nobody.sock", lambda: None, clock)


def test_the_queue_is_counted_by_model_kind_bucket_and_state(
    store: Store, metrics: ApiMetrics
) -> None:
    store.models.plan_for([PlannedModel("owl", "", 64)])
    _, refs = planned(store, 6, each=2)
    store.planning.mark_dispatched(refs[:1])
    found = scrape(metrics.read(None))
    where = {"model": "owl", "kind": "generate", "bucket": "32"}
    assert found["nightjar_queue_micro_batches"] == {
        labels(**where, state="ready"): 2,
        labels(**where, state="dispatched"): 1,
    }
    (age,) = found["nightjar_queue_oldest_seconds"].items()
    assert age[0] == labels(**where)
    assert 0 <= age[1] < 60
    assert found["nightjar_open_jobs"] == {labels(): 1}
    assert found["nightjar_open_rows"] == {labels(): 6}
    assert found["nightjar_queue_reading_cut"] == {labels(): 0}


def test_a_model_that_nobody_plans_for_has_no_name_of_its_own(
    store: Store, metrics: ApiMetrics
) -> None:
    planned(store, 1)
    (found,) = scrape(metrics.read(None))["nightjar_queue_micro_batches"]
    assert ("model", "other") in found


def test_rows_that_this_process_landed_are_counted(store: Store, metrics: ApiMetrics) -> None:
    _, (ref,) = planned(store, 3, each=3)
    assert compute(store, ref)
    found = scrape(metrics.read(None))
    assert found["nightjar_rows_total"][labels(outcome="completed")] == 3
    assert found["nightjar_landed_tokens_total"][labels(kind="saved")] == 6


def test_scrapes_share_one_reading(
    store: Store, metrics: ApiMetrics, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings, read = [], store.depths.read
    monkeypatch.setattr(store.depths, "read", lambda: readings.append(1) or read())
    for _ in range(5):
        metrics.read(None)
    assert len(readings) == 1
    clock.now += READ_EVERY_S
    metrics.read(None)
    assert len(readings) == 2


def test_parts_and_workers(store: Store, metrics: ApiMetrics) -> None:
    store.heartbeats.beat("gpu", ComputeSeconds(), {"models": []})
    store.heartbeats.beat("sweeper", ComputeSeconds())
    found = scrape(metrics.read(None))
    assert found["nightjar_gpu_workers"] == {labels(): 1}
    assert found["nightjar_part_up"] == {
        labels(part="database"): 1,
        labels(part="uploads"): 1,
        labels(part="broker"): 1,
        labels(part="planner"): 0,
    }


def test_a_database_that_is_away_leaves_the_other_metrics(
    store: Store, metrics: ApiMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nightjar.jobs.errors import StoreUnavailableError  # noqa: PLC0415

    def away() -> None:
        raise StoreUnavailableError("away")

    monkeypatch.setattr(store.depths, "read", away)
    found = scrape(metrics.read(None))
    assert found["nightjar_part_up"][labels(part="database")] == 0
    assert "nightjar_rows_total" in found
    assert "nightjar_open_jobs" not in found


def test_what_waits_is_counted_up_to_a_bound(
    store: Store, metrics: ApiMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depths, "MOST_READY", 3)
    planned(store, 5)
    found = scrape(metrics.read(None))
    assert sum(found["nightjar_queue_micro_batches"].values()) == 3
    assert found["nightjar_queue_reading_cut"] == {labels(): 1}


def test_requests_are_timed_by_the_template_of_their_route(
    store: Store, metrics: ApiMetrics
) -> None:
    job_id = submit(store, [{"prompt": "a", "max_tokens": 1}])
    app = create_app(store, lambda _: None, observe=observe_request, metrics=metrics.read)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert client.get(f"/v1/jobs/{job_id}").status_code == 200
        assert client.get("/v1/jobs/nobodys").status_code == 404
        assert client.get("/no/such/path").status_code == 404
        assert client.request("BREW", "/v1/jobs").status_code == 405
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    counts = scrape(answer.text)["nightjar_http_request_seconds_count"]
    job = {"method": "GET", "route": "/v1/jobs/{job_id}"}
    assert counts[labels(**job, status="2xx")] == 1
    assert counts[labels(**job, status="4xx")] == 1
    assert counts[labels(method="GET", route="none", status="4xx")] == 1
    assert job_id not in answer.text
    assert {dict(found)["method"] for found in counts} <= {"GET", "other"}


def test_only_an_administrator_reads_metrics_where_keys_are_in_use(
    store: Store, metrics: ApiMetrics
) -> None:
    keys = {scope: store.accounts.create_key(NewKey("default", scope))[0] for scope in Scope}
    app = create_app(store, lambda _: None, observe=observe_request, metrics=metrics.read)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert client.get("/metrics").status_code == 401
        for scope, status in ((Scope.READ, 403), (Scope.SUBMIT, 403), (Scope.ADMIN, 200)):
            headers = {"authorization": f"Bearer {keys[scope]}"}
            assert client.get("/metrics", headers=headers).status_code == status


def explained(store: Store, read: Callable[[], object]) -> list[str]:
    """The plans of the statements that `read` executes."""
    engine, plans, inside = store.database.engine, [], []

    def explain(conn, cursor, statement, parameters, context, executemany):
        if inside or not re.match(r"\s*(SELECT|WITH)", statement):
            return
        inside.append(1)
        if not store.database.is_sqlite:
            # Small tables are read whole, whatever indexes they have.
            conn.exec_driver_sql("SET enable_seqscan = off")
        prefix = "EXPLAIN QUERY PLAN" if store.database.is_sqlite else "EXPLAIN"
        for row in conn.exec_driver_sql(f"{prefix} {statement}", parameters).all():
            plans.append(str(row[-1]))
        inside.clear()

    sa.event.listen(engine, "before_cursor_execute", explain)
    try:
        read()
    finally:
        sa.event.remove(engine, "before_cursor_execute", explain)
    return plans


@pytest.mark.every_database
def test_no_reading_scans_a_table(store: Store) -> None:
    for _ in range(5):
        planned(store, 40, each=1)
    plans = explained(store, store.depths.read)
    assert plans
    scans = [
        plan
        for plan in plans
        if re.search(r"Seq Scan on|SCAN (job|micro_batch|request)(?! USING)", plan)
    ]
    assert scans == []
