"""Retention over HTTP: a job's own time, and what is said of a job that was purged."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

from nightjar.jobs.api import create_app
from nightjar.jobs.purge_records import PurgeScope
from nightjar.jobs.store import Store
from tests.batches import completions, compute_all, finalize_all, landed
from tests.bulk_jobs import finished_job
from tests.jobs import planned

LINE = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"p"}}\n'
ALL = PurgeScope(older_than_s=-60.0)


@pytest.fixture
def client(store: Store) -> Iterator[TestClient]:
    with TestClient(create_app(store, lambda _: None, served_model="tiny")) as opened:
        yield opened


def error_of(response: Any) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["message"]


def test_a_job_asks_for_a_time_of_its_own(client: TestClient) -> None:
    made = client.post("/v1/jobs?keep_results=7d", content=LINE).json()
    assert (made["keep_results_s"], made["purged_at"]) == (7 * 86_400, None)
    assert client.get(f"/v1/jobs/{made['id']}").json()["keep_results_s"] == 7 * 86_400
    assert client.post("/v1/jobs", content=LINE).json()["keep_results_s"] is None
    for text in ("1m", "0d", "366d", "soon", "7"):
        status, code, message = error_of(client.post(f"/v1/jobs?keep_results={text}", content=LINE))
        assert (status, code) == (400, "invalid_keep_results")
        assert "at least 1 hour and at most 365 days" in message or "no span of time" in message


def test_another_retention_under_the_same_key_is_refused(client: TestClient) -> None:
    key = {"Idempotency-Key": "night-1"}
    first = client.post("/v1/jobs?keep_results=7d", content=LINE, headers=key)
    again = client.post("/v1/jobs?keep_results=7d", content=LINE, headers=key)
    other = client.post("/v1/jobs?keep_results=8d", content=LINE, headers=key)
    assert (first.status_code, again.status_code) == (201, 200)
    assert error_of(other)[:2] == (409, "idempotency_key_reused")


def test_a_purged_job_says_so(client: TestClient, store: Store) -> None:
    job_id = finished_job(store, 200)
    planned(store, 1)
    before = client.get(f"/v1/jobs/{job_id}").json()
    assert store.retention.sweep(ALL).rows == 200
    shown = client.get(f"/v1/jobs/{job_id}").json()
    assert shown["purged_at"] >= shown["finished_at"]
    same = {"purged_at", "micro_batches", "requests_per_second"}
    assert {k: v for k, v in shown.items() if k not in same} == {
        k: v for k, v in before.items() if k not in same
    }
    listed = {one["id"]: one["purged_at"] for one in client.get("/v1/jobs").json()["data"]}
    assert listed[job_id] == shown["purged_at"]
    for path in ("results", "output", "errors"):
        status, code, message = error_of(client.get(f"/v1/jobs/{job_id}/{path}"))
        assert (status, code) == (410, "results_purged")
        assert job_id in message
    status, code, message = error_of(client.post(f"/v1/jobs/{job_id}/retry"))
    assert (status, code) == (409, "wrong_state")
    assert "submit it again" in message
    assert client.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "completed"


def test_the_openai_client_sees_that_the_files_of_a_batch_are_gone(
    client: TestClient, store: Store
) -> None:
    batch = landed(store, completions(2))
    compute_all(store, batch, refused=1)
    store.shares.settle()
    finalize_all(store)
    with openai.OpenAI(
        api_key="none", base_url="http://testserver/v1", http_client=client, max_retries=0
    ) as official:
        made = official.batches.retrieve(batch.id)
        assert made.output_file_id is not None
        assert official.files.content(made.output_file_id).content
        assert store.retention.sweep(ALL).jobs == 1
        gone = official.batches.retrieve(batch.id)
        assert (gone.status, gone.output_file_id, gone.error_file_id) == ("completed", None, None)
        assert gone.request_counts == made.request_counts
        assert (gone.model_extra or {})["purged_at"] >= (gone.completed_at or 0)
        for file_id in (made.output_file_id, made.error_file_id, made.input_file_id):
            with pytest.raises(openai.NotFoundError):
                official.files.content(str(file_id))
        assert [one.id for one in official.files.list()] == []
