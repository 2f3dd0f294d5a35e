"""Single calls over HTTP: their shapes, their errors, their limits."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.testclient import TestClient

from nightjar.jobs.api import create_app
from nightjar.jobs.api.body import UploadLimits
from nightjar.jobs.api.calls import CallPath, CallSettings
from nightjar.jobs.records import (
    NewResult,
    RequestError,
)
from nightjar.jobs.store import Store
from tests.call_worker import Worker, result_of
from tests.processes import wait_until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
Make = Callable[[TestClient], None]


@pytest.fixture
def worker(store: Store) -> Iterator[Worker]:
    worker = Worker(store)
    yield worker
    worker.answers.set()
    worker.threads.shutdown()


@pytest.fixture
def client(store: Store, worker: Worker) -> Iterator[TestClient]:
    with opened(store, worker) as client:
        yield client


def opened(store: Store, worker: Worker, **settings: Any) -> TestClient:
    calls = CallSettings(path=CallPath(worker.plan, worker.send), **settings)
    limits = UploadLimits(stalled_after_s=1.0)
    app = create_app(store, lambda _: None, served_model="tiny", limits=limits, calls=calls)
    return TestClient(app)


def error(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    return found


def events(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_a_completion(client: TestClient, store: Store) -> None:
    answer = client.post(TEXT, json={"model": "tiny", "prompt": "hello"})
    body = answer.json()
    assert answer.status_code == 200
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "hi 0", "logprobs": None, "finish_reason": "stop"}
    ]
    job_id = answer.headers["X-Request-Id"]
    assert body["id"] == f"cmpl-{job_id.removeprefix('job_')}"
    assert store.jobs.get(job_id).completed == 1
    assert client.get("/v1/jobs").json()["data"] == []


def test_a_chat(client: TestClient) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = client.post(CHAT, json={"messages": messages, "n": 2}).json()
    assert body["object"] == "chat.completion"
    assert [choice["message"]["content"] for choice in body["choices"]] == ["hi 0", "hi 1"]
    assert body["id"].startswith("chatcmpl-")


def test_a_stream_of_a_completion(client: TestClient) -> None:
    asked = {"prompt": "hello", "n": 2, "logprobs": 1, "stream": True}
    found = events(client.post(TEXT, json=asked))
    assert [chunk["choices"][0]["text"] for chunk in found] == ["hi 0", "hi 1"]
    assert found[0]["choices"][0]["logprobs"]["tokens"] == ["hi"]
    assert {chunk["object"] for chunk in found} == {"text_completion"}
    assert all("usage" not in chunk for chunk in found)


def test_a_stream_of_a_chat_with_its_usage(client: TestClient) -> None:
    asked = {
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "n": 2,
        "logprobs": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, last = events(client.post(CHAT, json=asked))
    assert {chunk["object"] for chunk in [*chunks, last]} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    for sample in range(2):
        role, text, end = (
            chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == sample
        )
        assert role["delta"] == {"role": "assistant", "content": ""}
        assert text["delta"] == {"content": f"hi {sample}"}
        assert text["logprobs"]["content"][0]["token"] == "hi"
        assert (end["delta"], end["finish_reason"]) == ({}, "stop")
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(("path", "version"), [("/rerank", "2"), ("/v1/rerank", "1")])
def test_a_ranking(client: TestClient, path: str, version: str) -> None:
    asked = {
        "model": "tiny",
        "query": "sky",
        "documents": ["a", {"text": "b"}, "c"],
        "top_n": 2,
        "max_tokens_per_doc": None,
        "return_documents": None,
        "priority": 3,
    }
    body = client.post(path, json=asked).json()
    assert [result["index"] for result in body["results"]] == [1, 2]
    scores = [result["relevance_score"] for result in body["results"]]
    assert 1 >= scores[0] > scores[1] >= 0
    assert all("document" not in result for result in body["results"])
    assert body["id"].startswith("rerank-")
    assert body["meta"] == {
        "api_version": {"version": version},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": 13},
    }
    assert body["usage"]["total_tokens"] == 13


def test_documents_come_back_where_they_are_asked_for(client: TestClient) -> None:
    asked = {"query": "sky", "documents": ["a", {"text": "b"}], "return_documents": True}
    results = client.post("/v2/rerank", json=asked).json()["results"]
    assert [result["document"] for result in results] == [{"text": "b"}, {"text": "a"}]


WRONG = [
    (TEXT, b"{", 400, "invalid_json", None),
    (TEXT, b"[]", 400, "invalid_json", None),
    (TEXT, b'{"prompt": "\xff"}', 400, "invalid_encoding", None),
    (TEXT, b'{"prompt": ' + b"[" * 100_000, 400, "invalid_json", None),
    (TEXT, b'{"prompt": "a", "temperature": NaN}', 400, "invalid_json", None),
    (TEXT, b"{}", 400, "missing_field", "prompt"),
    (TEXT, b'{"prompt": "a", "max_tokens": 0}', 400, "invalid_value", "max_tokens"),
    (TEXT, b'{"prompt": "a", "stream": 1}', 400, "invalid_value", "stream"),
    (TEXT, b'{"prompt": ["a", "b"]}', 400, "unsupported", "prompt"),
    (TEXT, b'{"prompt": "a", "stream_options": 1, "stream": true}', 400, "invalid_value", None),
    (
        TEXT,
        b'{"prompt": "a", "stream": true, "stream_options": {"include_usage": 1}}',
        400,
        "invalid_value",
        "stream_options.include_usage",
    ),
    (CHAT, b'{"messages": []}', 400, "invalid_value", "messages"),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "tools": [1]}', 400, None, "tools"),
    ("/rerank", b'{"query": "a", "documents": []}', 400, "invalid_value", "documents"),
    ("/rerank", b'{"query": "a", "documents": ["b"], "top_n": 0}', 400, None, "top_n"),
    ("/rerank", b'{"query": "a", "documents": ["b"], "stream": true}', 400, None, "stream"),
]


@pytest.mark.parametrize(("path", "raw", "status", "code", "param"), WRONG)
@pytest.mark.sampled
def test_a_wrong_body(
    client: TestClient, path: str, raw: bytes, status: int, code: str | None, param: str | None
) -> None:
    found = error(client.post(path, content=raw), status)
    assert found["type"] == "invalid_request_error"
    assert code in (None, found["code"])
    assert param in (None, found["param"])
    assert len(found["message"]) > 20


def test_a_body_that_is_too_large(client: TestClient) -> None:
    raw = json.dumps({"prompt": "a" * (5 << 20)}).encode()
    assert error(client.post(TEXT, content=raw), 413)["code"]
    assert error(client.post(TEXT, content=iter([raw])), 413)["code"]  # without its length


def test_a_compressed_body_and_one_of_another_kind(client: TestClient) -> None:
    compressed = client.post(TEXT, content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert error(compressed, 415)["code"] == "unsupported_encoding"
    form = client.post(TEXT, files={"prompt": b"a"})
    assert error(form, 415)["code"] == "unsupported_content_type"


def test_what_the_model_cannot_compute(client: TestClient, worker: Worker) -> None:
    worker.refusal = RequestError("model_not_found", "it serves 'tiny'", "body.model")
    found = error(client.post(TEXT, json={"prompt": "a", "model": "gpt-9"}), 404)
    assert (found["code"], found["param"]) == ("model_not_found", "model")
    assert found["type"] == "not_found_error"
    worker.refusal = RequestError("context_length_exceeded", "too long", "body.prompt")
    found = error(client.post(TEXT, json={"prompt": "a"}), 400)
    assert (found["code"], found["param"]) == ("context_length_exceeded", "prompt")
    assert worker.sent == []


def test_a_failed_row_answers_with_its_status(client: TestClient, worker: Worker) -> None:
    worker.make = lambda request: NewResult.failure(
        request.id, "internal_error", "it broke", status=500
    )
    for stream in (False, True):
        found = error(client.post(TEXT, json={"prompt": "a", "stream": stream}), 500)
        assert (found["code"], found["type"]) == ("internal_error", "server_error")


def test_without_a_broker_the_row_waits_for_the_dispatcher(
    client: TestClient, worker: Worker, store: Store
) -> None:
    worker.broken = True
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(client.post, TEXT, json={"prompt": "a"})
        wait_until("the micro-batch", lambda: store.planning.dispatchable(1))
        worker.broken = False
        for ref in store.planning.dispatchable(1):
            worker.send(ref)
        assert answer.result().status_code == 200


def test_a_call_that_takes_too_long_is_cancelled(store: Store, worker: Worker) -> None:
    worker.answers.clear()
    with opened(store, worker, timeout_s=0.3) as client:
        found = error(client.post(TEXT, json={"prompt": "a"}), 504)
        assert (found["code"], found["type"]) == ("timeout", "server_error")
        job_id = worker.sent[0].job_id
        wait_until("its end", lambda: store.jobs.get(job_id).is_over, 10)
        assert store.jobs.get(job_id).cancelled == 1


def test_calls_beyond_the_limit_are_told_when_to_come_again(store: Store, worker: Worker) -> None:
    worker.answers.clear()
    with opened(store, worker, waiting=2) as client, ThreadPoolExecutor(2) as threads:
        first = [threads.submit(client.post, TEXT, json={"prompt": "a"}) for _ in range(2)]
        wait_until("both calls", lambda: len(worker.sent) == 2, 10)
        refused = client.post(TEXT, json={"prompt": "a"})
        assert error(refused, 503)["code"] == "too_many_calls"
        assert int(refused.headers["Retry-After"]) >= 1
        worker.answers.set()
        assert [call.result().status_code for call in first] == [200, 200]
        assert client.post(TEXT, json={"prompt": "a"}).status_code == 200


def answer_late(worker: Worker, sent: int) -> None:
    """Let the worker go on a while after it was sent the next call."""
    wait_until("the call to be sent", lambda: len(worker.sent) > sent)
    time.sleep(1.0)
    worker.answers.set()


def test_a_stream_that_takes_long_says_that_it_lives(
    client: TestClient, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightjar.jobs.api.call_routes.KEEP_ALIVE_S", 0.1)
    for make, last in (
        (result_of, "data: [DONE]"),
        (lambda one: NewResult.failure(one.id, "refused", "no good"), "data: {"),
    ):
        worker.answers.clear()
        worker.make = make
        releasing = threading.Thread(target=answer_late, args=(worker, len(worker.sent)))
        releasing.start()
        answer = client.post(TEXT, json={"prompt": "a", "stream": True})
        releasing.join()
        parts = answer.text.strip().split("\n\n")
        assert answer.status_code == 200
        assert parts[0] == ": waiting"
        assert parts[-1].startswith(last)
