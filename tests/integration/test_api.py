"""The HTTP API: follow a job, fetch its results, cancel it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

import nightjar
from nightjar.jobs.api import create_app
from nightjar.jobs.records import NewResult
from nightjar.jobs.store import Store
from nightjar.jobs.workers import Crash
from tests.jobs import planned, submit
from tests.outcomes import answers, claim, compute

STEERING = ["cancel", "pause", "resume", "retry"]


@pytest.fixture
def woken() -> list[str]:
    """The jobs that the planner was told of."""
    return []


@pytest.fixture
def client(store: Store, woken: list[str]) -> Iterator[TestClient]:
    with TestClient(create_app(store, woken.append, served_model="tiny")) as opened:
        yield opened


@pytest.fixture
def job_id(store: Store) -> str:
    """Five finished rows, of which the one with index 2 failed."""
    job_id, refs = planned(store, 5)
    for ref in refs:
        claimed = claim(store, ref)
        (result,) = answers(claimed)
        if claimed.requests[0].index == 2:
            result = NewResult.failure(result.request_id, "refused", "no good", param="body.stop")
        store.leases.finish(ref.id, 0, "worker", [result])
    return job_id


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_finished_job(client: TestClient, job_id: str) -> None:
    job = client.get(f"/v1/jobs/{job_id}").json()
    assert job["id"] == job_id
    assert job["object"] == "job"
    assert job["state"] == "completed_with_failures"
    counts = {"total": 5, "completed": 4, "failed": 1, "cancelled": 0, "reused": 0}
    assert job["counts"] == counts
    assert job["usage"] == {
        "prompt_tokens": 12,
        "requested_tokens": 16,
        "generated_tokens": 8,
        "saved_tokens": 8,
        "reused_tokens": 0,
    }
    assert job["created_at"] <= job["started_at"] <= job["finished_at"]
    assert job["requests_per_second"] > 0
    assert job["micro_batches"]["done"] == 5


def test_a_waiting_job(client: TestClient, store: Store) -> None:
    job = client.get(f"/v1/jobs/{submit(store, [{'prompt': 'a'}])}").json()
    assert (job["state"], job["started_at"], job["finished_at"]) == ("queued", None, None)
    assert job["requests_per_second"] is None


def test_results_in_pages(client: TestClient, job_id: str) -> None:
    url = f"/v1/jobs/{job_id}/results"
    first = client.get(url, params={"limit": 3}).json()
    assert first["object"] == "list"
    assert (first["has_more"], first["next_after"]) == (True, 2)
    assert [item["custom_id"] for item in first["data"]] == ["row-0", "row-1", "row-2"]
    assert first["data"][0]["response"]["body"] == {"text": "answer to row-0"}
    assert first["data"][2]["error"] is None
    assert first["data"][2]["response"]["body"]["error"] == {
        "code": "refused",
        "message": "no good",
        "type": "invalid_request_error",
        "param": "body.stop",
        "line": 3,
    }
    rest = client.get(url, params={"limit": 3, "after": 2}).json()
    assert [item["custom_id"] for item in rest["data"]] == ["row-3", "row-4"]
    assert (rest["has_more"], rest["next_after"]) == (False, 4)
    failed = client.get(url, params={"outcome": "failed"}).json()
    assert [item["custom_id"] for item in failed["data"]] == ["row-2"]


def test_following_a_running_job(client: TestClient, store: Store) -> None:
    """Rows land behind the one that was seen last."""
    job_id, refs = planned(store, 5)
    url, seen, after = f"/v1/jobs/{job_id}/results", list[str](), -1
    for ref in reversed(refs):
        compute(store, ref)
        page = client.get(url, params={"order": "landed", "after": after}).json()
        seen += [item["custom_id"] for item in page["data"]]
        after = page["next_after"]
        assert page["complete"] is (ref is refs[0])
    assert seen == ["row-4", "row-3", "row-2", "row-1", "row-0"]


def test_a_page_of_a_running_job_says_which_row_it_waits_for(
    client: TestClient, store: Store
) -> None:
    job_id, refs = planned(store, 3)
    compute(store, refs[0])
    compute(store, refs[2])
    page = client.get(f"/v1/jobs/{job_id}/results").json()
    assert [item["custom_id"] for item in page["data"]] == ["row-0"]
    assert (page["next_after"], page["waits_for_row"]) == (0, 1)
    assert (page["has_more"], page["complete"]) == (False, False)


def test_a_page_is_bounded_in_bytes(client: TestClient, store: Store) -> None:
    """Rankings of 10,000 documents: a page of the largest limit is still a few megabytes."""
    job_id, refs = planned(store, 60, each=60)
    claimed = claim(store, refs[0])
    ranking = {"results": [{"index": n, "relevance_score": -1.5} for n in range(10_000)]}
    results = [NewResult(request.id, 200, ranking) for request in claimed.requests]
    assert store.leases.finish(refs[0].id, 0, "worker", results)
    seen, after, complete = list[str](), -1, False
    while not complete:
        query = {"after": after, "limit": 10_000}
        response = client.get(f"/v1/jobs/{job_id}/results", params=query)
        assert len(response.content) < 5_000_000
        page = response.json()
        seen += [item["custom_id"] for item in page["data"]]
        after, complete = page["next_after"], page["complete"]
    assert seen == [f"row-{n}" for n in range(60)]


def test_the_output_of_an_unfinished_job_says_so(client: TestClient, store: Store) -> None:
    job_id, refs = planned(store, 2)
    compute(store, refs[1])
    output = client.get(f"/v1/jobs/{job_id}/output")
    assert len(lines(output.text)) == 1
    assert output.headers["nightjar-job-complete"] == "false"
    assert output.headers["nightjar-job-state"] == "running"
    compute(store, refs[0])
    output = client.get(f"/v1/jobs/{job_id}/output")
    assert output.headers["nightjar-job-complete"] == "true"


def test_downloads(client: TestClient, job_id: str) -> None:
    output = client.get(f"/v1/jobs/{job_id}/output")
    assert output.headers["content-type"].startswith("application/jsonl")
    ids = [item["custom_id"] for item in lines(output.text)]
    assert ids == ["row-0", "row-1", "row-3", "row-4"]
    errors = client.get(f"/v1/jobs/{job_id}/errors")
    assert [item["custom_id"] for item in lines(errors.text)] == ["row-2"]


def test_jobs_in_pages(client: TestClient, store: Store) -> None:
    for _ in range(3):
        submit(store, [{"prompt": "a"}])
    first = client.get("/v1/jobs", params={"limit": 2}).json()
    assert first["has_more"]
    rest = client.get("/v1/jobs", params={"limit": 2, "after": first["next_after"]}).json()
    assert not rest["has_more"]
    listed = [job["id"] for job in first["data"] + rest["data"]]
    assert listed == [job.id for job in store.jobs.newest()]


def test_cancelling(client: TestClient, store: Store) -> None:
    job_id, refs = planned(store, 2)
    compute(store, refs[0])
    job = client.post(f"/v1/jobs/{job_id}/cancel").json()
    assert (job["state"], job["cancel_requested"]) == ("cancelled", True)
    counts = {"total": 2, "completed": 1, "failed": 0, "cancelled": 1, "reused": 0}
    assert job["counts"] == counts
    (error,) = lines(client.get(f"/v1/jobs/{job_id}/errors").text)
    assert (error["response"], error["error"]["code"]) == (None, "batch_cancelled")


def test_pausing_and_resuming(client: TestClient, store: Store) -> None:
    job_id, refs = planned(store, 2)
    assert client.post(f"/v1/jobs/{job_id}/pause").json()["state"] == "paused"
    assert client.get(f"/v1/jobs/{job_id}").json()["state"] == "paused"
    resumed = client.post(f"/v1/jobs/{job_id}/resume").json()
    assert (resumed["state"], resumed["warning"]) == ("queued", None)
    assert all(compute(store, ref) for ref in refs)
    assert client.post(f"/v1/jobs/{job_id}/pause").json()["state"] == "completed"


def test_a_request_that_crashed_is_shown_with_the_reason_and_retried(
    client: TestClient, store: Store, woken: list[str]
) -> None:
    job_id, (ref,) = planned(store, 2, each=2)
    crash = Crash("the compute process was ended by SIGSEGV", allowed=1)
    claimed = claim(store, ref)
    assert store.suspects.add(ref.id, 0, "worker", crash, answers(claimed)[:1])
    (suspect,) = store.planning.dispatchable(9)
    claim(store, suspect)
    assert store.suspects.add(suspect.id, 0, "worker", crash)

    job = client.get(f"/v1/jobs/{job_id}").json()
    assert (job["state"], job["micro_batches"]["split"]) == ("completed_with_failures", 1)
    (shown,) = lines(client.get(f"/v1/jobs/{job_id}/errors").text)
    assert shown["custom_id"] == "row-1"
    told = shown["response"]["body"]["error"]
    assert (told["code"], told["type"]) == ("compute_lost", "server_error")
    assert told["message"] == (
        "computed alone once and never answered; the last time the compute process was ended by "
        "SIGSEGV"
    )
    retried = client.post(f"/v1/jobs/{job_id}/retry").json()
    assert (retried["retried"], retried["state"], retried["warning"]) == (1, "running", None)
    assert (retried["counts"]["failed"], retried["finished_at"]) == (0, None)
    assert woken == [job_id]
    again = client.post(f"/v1/jobs/{job_id}/retry").json()
    assert (again["retried"], woken) == (0, [job_id])


def test_a_cancelled_job_cannot_be_retried(client: TestClient, store: Store) -> None:
    job_id, _ = planned(store, 1)
    client.post(f"/v1/jobs/{job_id}/cancel")
    response = client.post(f"/v1/jobs/{job_id}/retry")
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "wrong_state"


def test_an_unknown_job(client: TestClient) -> None:
    calls = [("GET", path) for path in ("", "/results", "/output", "/errors")]
    for method, path in [*calls, *(("POST", f"/{act}") for act in STEERING)]:
        response = client.request(method, f"/v1/jobs/job_nothing{path}")
        assert response.status_code == 404, path
        assert response.json()["error"]["code"] == "unknown_job"


@pytest.mark.every_database
@pytest.mark.parametrize("job_id", ["%00", "job_%00", "j" * 65, "%F0%9F%8C%99"])
def test_an_id_that_no_job_can_have(client: TestClient, job_id: str) -> None:
    calls = [("GET", path) for path in ("", "/results", "/output", "/errors")]
    for method, path in [*calls, *(("POST", f"/{act}") for act in STEERING)]:
        response = client.request(method, f"/v1/jobs/{job_id}{path}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_job")
    response = client.get(f"/v1/jobs?after={job_id}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "after")


def test_bad_parameters(client: TestClient, job_id: str) -> None:
    queries: list[dict[str, Any]]
    queries = [{"limit": 0}, {"limit": 10_001}, {"after": "x"}, {"outcome": "good"}]
    queries += [{"after": -2}, {"after": 2**63}, {"after": 10**40}, {"order": "any"}]
    for query in queries:
        response = client.get(f"/v1/jobs/{job_id}/results", params=query)
        assert response.status_code == 400, query
        assert response.json()["error"]["param"] == next(iter(query))


def test_health(client: TestClient) -> None:
    response = client.get("/health")
    assert response.status_code == 200
    parts = {"database": "ok", "uploads": "ok"}
    expected = {"status": "ok", "version": nightjar.__version__, "parts": parts, "models": {}}
    assert response.json() == expected


def test_a_database_without_tables(database_url: str) -> None:
    without_tables = Store(database_url)
    with TestClient(create_app(without_tables, lambda job_id: None)) as client:
        health, response = client.get("/health"), client.get("/v1/jobs")
    message = "the database lacks Nightjar's tables; run `nightjar migrate`"
    assert (health.status_code, health.json()["message"]) == (503, message)
    assert response.status_code in {500, 503}
    assert response.json()["error"]["code"] in {"store_error", "database_unavailable"}
    assert response.json()["error"]["message"] == message
    without_tables.close()


@pytest.mark.parametrize(
    "url", ["postgresql://nightjar:geheim@127.0.0.1:1/secret_db", "sqlite:////nowhere/secret_db"]
)
def test_strangers_do_not_learn_where_the_database_is(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    away = Store(url)
    with TestClient(create_app(away, lambda job_id: None, served_model="tiny")) as client:
        row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
        answers = [
            client.get("/health"),
            client.get("/v1/jobs"),
            client.get("/v1/jobs/job_1/results"),
            client.post("/v1/jobs", json=row, headers={"idempotency-key": "k"}),
        ]
    for answer in answers:
        assert answer.status_code == 503
        for said in ("127.0.0.1", "secret", "geheim", "nowhere", "port"):
            assert said not in answer.text
        assert "the database is not available; the API's log says why" in answer.text
    assert "geheim" not in caplog.text
    away.close()
