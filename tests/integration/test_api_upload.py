"""Submitting a job over HTTP."""

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from nightjar.jobs.api import create_app
from nightjar.jobs.api.upload import UploadLimits
from nightjar.jobs.store import Store
from tests.outcomes import codes

HEADERS = {"content-type": "application/jsonl"}


class Planner:
    """Remembers who was woken; refuses while the broker is down."""

    def __init__(self) -> None:
        self.woken: list[str] = []
        self.broker_is_down = False

    def wake(self, job_id: str) -> None:
        if self.broker_is_down:
            raise ConnectionError("no broker at redis://:secret@nowhere")
        self.woken.append(job_id)


@pytest.fixture
def planner() -> Planner:
    return Planner()


@pytest.fixture
def client(store: Store, planner: Planner) -> Iterator[TestClient]:
    app = create_app(store, planner.wake, served_model="tiny", limits=UploadLimits(2_000_000))
    with TestClient(app) as opened:
        yield opened


def row(custom_id: str, **body: Any) -> bytes:
    data = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions"}
    return json.dumps({**data, "body": {"prompt": "a secret", **body}}).encode() + b"\n"


def test_a_job(client: TestClient, store: Store, planner: Planner) -> None:
    response = client.post("/v1/jobs", content=row("a") + row("b"), headers=HEADERS)
    assert response.status_code == 201
    job = response.json()
    assert (job["accepted"], job["rejected"], job["warning"]) == (2, 0, None)
    assert (job["state"], job["model"], job["counts"]["total"]) == ("queued", "tiny", 2)
    assert planner.woken == [job["id"]]
    assert [item.custom_id for item in store.queued_requests(job["id"], 9)] == ["a", "b"]


def test_good_rows_go_on_beside_bad_ones(client: TestClient, store: Store) -> None:
    text = row("a") + b"\n{broken\n" + row("b", max_tokens=0) + row("a") + row("c")[:-1]
    job = client.post("/v1/jobs", content=text, headers=HEADERS).json()
    assert (job["accepted"], job["rejected"]) == (2, 3)
    results = store.results(job["id"])
    assert codes(results) == ["invalid_json", "invalid_value", "duplicate_custom_id"]
    assert [item.line for item in results] == [3, 4, 5]


def test_a_large_upload_in_many_chunks(client: TestClient, store: Store) -> None:
    text = b"".join(row(f"row-{number}") for number in range(5_000))
    pieces = (text[start : start + 1_777] for start in range(0, len(text), 1_777))
    job = client.post("/v1/jobs", content=pieces, headers=HEADERS).json()
    assert (job["accepted"], job["rejected"]) == (5_000, 0)


def test_the_same_idempotency_key_gives_the_same_job(client: TestClient, planner: Planner) -> None:
    headers = {**HEADERS, "Idempotency-Key": "night"}
    first = client.post("/v1/jobs", content=row("a"), headers=headers)
    again = client.post("/v1/jobs", content=row("a"), headers=headers)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["id"] == first.json()["id"]
    assert len(planner.woken) == 1


def test_model_and_metadata(client: TestClient) -> None:
    query = {"model": "tiny", "metadata": '{"night": "밤"}'}
    job = client.post("/v1/jobs", params=query, content=row("a"), headers=HEADERS).json()
    assert (job["model"], job["metadata"]) == ("tiny", {"night": "밤"})


def test_a_model_that_is_not_served(client: TestClient, store: Store, planner: Planner) -> None:
    response = client.post("/v1/jobs?model=large", content=row("a"), headers=HEADERS)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        400,
        "model_not_found",
        "model",
    )
    assert "'tiny'" in error["message"]
    assert "'large'" in error["message"]
    assert (store.jobs(), planner.woken) == ([], [])


def test_any_model_where_none_is_named_as_served(store: Store) -> None:
    with TestClient(create_app(store, lambda job_id: None)) as client:
        response = client.post("/v1/jobs?model=large", content=row("a"), headers=HEADERS)
    assert (response.status_code, response.json()["model"]) == (201, "large")


@pytest.mark.parametrize(
    ("window", "seconds"), [("90s", 90), ("15m", 900), ("24h", 86_400), ("365d", 31_536_000)]
)
def test_a_completion_window(client: TestClient, window: str, seconds: int) -> None:
    query = {"completion_window": window}
    job = client.post("/v1/jobs", params=query, content=row("a"), headers=HEADERS).json()
    assert job["expires_at"] - job["created_at"] == pytest.approx(seconds, abs=0.01)


def test_without_a_completion_window_nothing_expires(client: TestClient) -> None:
    job = client.post("/v1/jobs", content=row("a"), headers=HEADERS).json()
    assert job["expires_at"] is None


@pytest.mark.parametrize(
    "window", ["", "h", "24", "24x", "-1h", "1.5h", "0s", "366d", "9" * 40 + "h", "²h", "1 h"]
)
def test_a_bad_completion_window(client: TestClient, store: Store, window: str) -> None:
    query = {"completion_window": window}
    response = client.post("/v1/jobs", params=query, content=row("a"), headers=HEADERS)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_completion_window"
    assert store.jobs() == []


def test_a_priority(client: TestClient, store: Store) -> None:
    query = {"priority": "7"}
    job = client.post("/v1/jobs", params=query, content=row("a"), headers=HEADERS).json()
    assert job["priority"] == store.job(job["id"]).priority == 7
    assert client.post("/v1/jobs", content=row("a"), headers=HEADERS).json()["priority"] == 0


@pytest.mark.parametrize("priority", ["", "-1", "10", "1.0", "high", "²", " 1"])
def test_a_bad_priority(client: TestClient, store: Store, priority: str) -> None:
    query = {"priority": priority}
    response = client.post("/v1/jobs", params=query, content=row("a"), headers=HEADERS)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "priority"
    assert store.jobs() == []


def test_bad_metadata(client: TestClient, store: Store) -> None:
    query = {"metadata": "{"}
    response = client.post("/v1/jobs", params=query, content=row("a"), headers=HEADERS)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "metadata"
    assert store.jobs() == []


def test_a_broker_that_is_down_is_a_warning(
    client: TestClient, store: Store, planner: Planner, caplog: pytest.LogCaptureFixture
) -> None:
    planner.broker_is_down = True
    response = client.post("/v1/jobs", content=row("a"), headers=HEADERS)
    assert response.status_code == 201
    assert "the job is stored" in response.json()["warning"]
    assert "secret" not in response.text
    assert store.jobs_to_plan() == [response.json()["id"]]
    assert "wake_failed" in [getattr(record, "action", None) for record in caplog.records]


@pytest.mark.parametrize("announced", [True, False])
def test_an_upload_that_is_too_long(client: TestClient, store: Store, announced: bool) -> None:
    text = row("a", stop="x" * 900) * 3_000
    content = (
        text
        if announced
        else (text[start : start + 65_536] for start in range(0, len(text), 65_536))
    )
    response = client.post("/v1/jobs", content=content, headers=HEADERS)
    assert response.status_code == 413
    assert "2000000 bytes" in response.json()["error"]["message"]
    assert store.jobs() == []


@pytest.mark.parametrize("text", [b"", b"\n \n\r\n"])
def test_an_upload_without_rows(client: TestClient, store: Store, text: bytes) -> None:
    response = client.post("/v1/jobs", content=text, headers=HEADERS)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "empty_job")
    assert store.jobs() == []


def test_a_form_is_refused(client: TestClient) -> None:
    response = client.post("/v1/jobs", files={"file": row("a")})
    assert response.status_code == 415


def test_a_bad_idempotency_key(client: TestClient) -> None:
    headers = {**HEADERS, "Idempotency-Key": "x" * 256}
    response = client.post("/v1/jobs", content=row("a"), headers=headers)
    assert response.json()["error"]["param"] == "Idempotency-Key"


def test_a_job_needs_a_model(store: Store) -> None:
    with TestClient(create_app(store, lambda job_id: None)) as client:
        response = client.post("/v1/jobs", content=row("a"), headers=HEADERS)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


def upload(store: Store, *messages: dict[str, Any]) -> int:
    """The status of an upload whose client sends these messages and then nothing more."""
    limits = UploadLimits(stalled_after_s=0.1)
    app = create_app(store, lambda job_id: None, served_model="tiny", limits=limits)
    waiting, sent = list(messages), list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        if not waiting:
            await asyncio.sleep(60)
        return waiting.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/jobs", "query_string": b""}
    asyncio.run(app({**scope, "headers": []}, receive, send))  # type: ignore[arg-type]
    return sent[0]["status"]


def test_an_upload_that_stalls_leaves_no_job(store: Store) -> None:
    first = {"type": "http.request", "body": row("a"), "more_body": True}
    assert upload(store, first) == 408
    assert store.jobs() == []


def test_an_upload_that_breaks_off_leaves_no_job(store: Store) -> None:
    first = {"type": "http.request", "body": row("a"), "more_body": True}
    assert upload(store, first, {"type": "http.disconnect"}) == 400
    assert store.jobs() == []


def test_prompts_are_not_logged(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="nightjar"):
        client.post("/v1/jobs", content=row("a") + row("b", stop=""), headers=HEADERS)
    assert caplog.records
    assert "a secret" not in caplog.text
