"""Submitting a job over HTTP."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from nightjar.jobs.api import create_app
from nightjar.jobs.api.body import UploadLimits
from nightjar.jobs.errors import ReusedKeyError
from nightjar.jobs.lines.batch_lines import BatchReader
from nightjar.jobs.records import NewJob
from nightjar.jobs.store import Store
from tests.outcomes import codes

HEADERS = {"content-type": "application/jsonl"}
STALLING = UploadLimits(stalled_after_s=0.1)


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
    assert [item.custom_id for item in store.backlog.queued_requests(job["id"], 9)] == ["a", "b"]


def test_good_rows_go_on_beside_bad_ones(client: TestClient, store: Store) -> None:
    text = row("a") + b"\n{broken\n" + row("b", max_tokens=0) + row("a") + row("c")[:-1]
    job = client.post("/v1/jobs", content=text, headers=HEADERS).json()
    assert (job["accepted"], job["rejected"]) == (2, 3)
    results = store.results.read(job["id"])
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


@pytest.mark.parametrize(
    ("query", "content"),
    [
        ({}, row("b")),
        ({}, row("a") + row("b")),
        ({"priority": "1"}, row("a")),
        ({"completion_window": "1h"}, row("a")),
        ({"metadata": '{"night": "2"}'}, row("a")),
        ({}, b""),
    ],
)
@pytest.mark.sampled
def test_a_known_idempotency_key_with_other_content_is_refused(
    client: TestClient, store: Store, query: dict[str, str], content: bytes
) -> None:
    headers = {**HEADERS, "Idempotency-Key": "night"}
    first = client.post("/v1/jobs", content=row("a"), headers=headers).json()
    other = client.post("/v1/jobs", params=query, content=content, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
    assert first["id"] in other.json()["error"]["message"]
    again = client.post("/v1/jobs", content=row("a"), headers=headers)
    assert (again.status_code, again.json()["id"]) == (200, first["id"])
    assert len(store.jobs.newest()) == 1


def test_of_two_at_once_with_one_key_the_one_with_other_content_is_refused(store: Store) -> None:
    """Both begin before either has landed."""
    opened = [store.jobs.submit(NewJob("tiny", "night")) for _ in range(3)]
    made = [submission.__enter__() for submission in opened]
    for submission, digest in zip(made, ("a", "a", "b"), strict=True):
        submission.add(BatchReader().rows(row("x")))
        submission.digest = digest
    opened[0].__exit__(None, None, None)
    opened[1].__exit__(None, None, None)
    assert (made[1].existing, made[1].job_id) == (True, made[0].job_id)
    with pytest.raises(ReusedKeyError):
        opened[2].__exit__(None, None, None)


def test_a_job_of_the_version_before_is_found_by_its_key(client: TestClient, store: Store) -> None:
    with store.jobs.submit(NewJob("tiny", "night")) as submission:
        submission.add(BatchReader().rows(row("a")))
    headers = {**HEADERS, "Idempotency-Key": "night"}
    response = client.post("/v1/jobs", content=row("b"), headers=headers)
    assert (response.status_code, response.json()["id"]) == (200, submission.job_id)


@pytest.mark.every_database
def test_an_upload_of_bad_lines_ends_with_the_first_of_them(store: Store) -> None:
    app = create_app(store, lambda job_id: None, served_model="tiny")
    with TestClient(app) as client:
        response = client.post("/v1/jobs", content=row("a") + b"x\n" * 100_000, headers=HEADERS)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "too_many_rejected")
    assert "10000 lines" in response.json()["error"]["message"]
    assert "line 2" in response.json()["error"]["message"]
    assert store.jobs.newest() == []
    if store.database.is_sqlite:
        assert Path(str(store.database.url.database)).stat().st_size < 1_000_000


def test_repeated_ids_are_bad_lines_too(store: Store) -> None:
    limits = UploadLimits(max_rejected=3)
    app = create_app(store, lambda job_id: None, served_model="tiny", limits=limits)
    with TestClient(app) as client:
        fewer = client.post("/v1/jobs", content=row("a") * 4, headers=HEADERS)
        more = client.post("/v1/jobs", content=row("a") * 5, headers=HEADERS)
    assert fewer.json()["rejected"] == 3
    assert (more.status_code, more.json()["error"]["code"]) == (400, "too_many_rejected")
    assert "line 2" in more.json()["error"]["message"]
    assert len(store.jobs.newest()) == 1


def test_a_job_has_so_many_rows_at_most(store: Store) -> None:
    limits = UploadLimits(max_rows=3)
    app = create_app(store, lambda job_id: None, served_model="tiny", limits=limits)
    with TestClient(app) as client:
        text = b"".join(row(str(number)) for number in range(4))
        response = client.post("/v1/jobs", content=text, headers=HEADERS)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "too_many_rows")
    assert store.jobs.newest() == []


def test_model_and_metadata(client: TestClient) -> None:
    query = {"model": "tiny", "metadata": '{"night": "밤"}'}
    job = client.post("/v1/jobs", params=query, content=row("a"), headers=HEADERS).json()
    assert (job["model"], job["metadata"]) == ("tiny", {"night": "밤"})


def test_a_model_that_is_not_served(client: TestClient, store: Store, planner: Planner) -> None:
    response = client.post("/v1/jobs?model=large", content=row("a"), headers=HEADERS)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    assert "'tiny'" in error["message"]
    assert "'large'" in error["message"]
    assert (store.jobs.newest(), planner.woken) == ([], [])


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
@pytest.mark.sampled
def test_a_bad_completion_window(client: TestClient, store: Store, window: str) -> None:
    query = {"completion_window": window}
    response = client.post("/v1/jobs", params=query, content=row("a"), headers=HEADERS)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_completion_window"
    assert store.jobs.newest() == []


def test_a_priority(client: TestClient, store: Store) -> None:
    query = {"priority": "7"}
    job = client.post("/v1/jobs", params=query, content=row("a"), headers=HEADERS).json()
    assert job["priority"] == store.jobs.get(job["id"]).priority == 7
    assert client.post("/v1/jobs", content=row("a"), headers=HEADERS).json()["priority"] == 0


@pytest.mark.parametrize("priority", ["", "-1", "10", "1.0", "high", "²", " 1"])
@pytest.mark.sampled
def test_a_bad_priority(client: TestClient, store: Store, priority: str) -> None:
    query = {"priority": priority}
    response = client.post("/v1/jobs", params=query, content=row("a"), headers=HEADERS)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "priority"
    assert store.jobs.newest() == []


def test_bad_metadata(client: TestClient, store: Store) -> None:
    query = {"metadata": "{"}
    response = client.post("/v1/jobs", params=query, content=row("a"), headers=HEADERS)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "metadata"
    assert store.jobs.newest() == []


def test_a_broker_that_is_down_is_a_warning(
    client: TestClient, store: Store, planner: Planner, caplog: pytest.LogCaptureFixture
) -> None:
    planner.broker_is_down = True
    response = client.post("/v1/jobs", content=row("a"), headers=HEADERS)
    assert response.status_code == 201
    assert "the job is stored" in response.json()["warning"]
    assert "secret" not in response.text
    assert store.backlog.jobs_to_plan() == [response.json()["id"]]
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
    assert store.jobs.newest() == []


@pytest.mark.parametrize("text", [b"", b"\n \n\r\n"])
def test_an_upload_without_rows(client: TestClient, store: Store, text: bytes) -> None:
    response = client.post("/v1/jobs", content=text, headers=HEADERS)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "empty_job")
    assert store.jobs.newest() == []


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


def upload(
    store: Store,
    *messages: dict[str, Any],
    limits: UploadLimits = STALLING,
    every_s: float = 0.0,
) -> tuple[int, str]:
    """Status and body of an upload whose client sends these messages and then nothing more."""
    app = create_app(store, lambda job_id: None, served_model="tiny", limits=limits)
    waiting, sent = list(messages), list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(every_s if waiting else 60)
        return waiting.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/jobs", "query_string": b""}
    asyncio.run(app({**scope, "headers": []}, receive, send))  # type: ignore[arg-type]
    return sent[0]["status"], sent[1]["body"].decode()


def pieces(size: int) -> list[dict[str, Any]]:
    """The messages of a client that never ends."""
    return [{"type": "http.request", "body": b"x" * size, "more_body": True}] * 10_000


def test_a_slow_upload_is_refused_though_it_never_stalls(store: Store) -> None:
    limits = UploadLimits(stalled_after_s=0.3, least_bytes_per_s=1_000)
    status, body = upload(store, *pieces(1), limits=limits, every_s=0.01)
    assert (status, "upload_too_slow" in body) == (408, True)
    assert "at least 1000 are needed" in body
    assert store.jobs.newest() == []


def test_an_upload_has_a_deadline_however_fast_it_is(store: Store) -> None:
    limits = UploadLimits(deadline_s=0.3)
    status, body = upload(store, *pieces(100), limits=limits, every_s=0.01)
    assert (status, "longer than 0 s" in body) == (408, True)
    assert store.jobs.newest() == []


def test_an_upload_that_stalls_leaves_no_job(store: Store) -> None:
    first = {"type": "http.request", "body": row("a"), "more_body": True}
    assert upload(store, first)[0] == 408
    assert store.jobs.newest() == []


def test_an_upload_that_breaks_off_leaves_no_job(store: Store) -> None:
    first = {"type": "http.request", "body": row("a"), "more_body": True}
    assert upload(store, first, {"type": "http.disconnect"})[0] == 400
    assert store.jobs.newest() == []


def test_prompts_are_not_logged(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="nightjar"):
        client.post("/v1/jobs", content=row("a") + row("b", stop=""), headers=HEADERS)
    assert caplog.records
    assert "a secret" not in caplog.text


@pytest.mark.parametrize(
    ("head", "mend"),
    [(b"PAR1\x15\x04", "one JSON object a line"), (b"\x1f\x8b\x08\x00", "gunzip"), (b"[{}]", "jq")],
)
def test_a_file_of_another_format_is_refused_at_once(
    client: TestClient, store: Store, head: bytes, mend: str
) -> None:
    """Else it would become thousands of bad lines."""
    answer = client.post(
        "/v1/jobs", content=head + b"\n" * 50, headers={"content-type": "application/jsonl"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_batch_lines")
    assert mend in answer.json()["error"]["message"]
    assert store.jobs.newest(5, None) == []
