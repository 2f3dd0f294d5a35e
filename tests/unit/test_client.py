"""What the client says when what answers is not the API."""

import time
from pathlib import Path

import httpx
import pytest

from nightjar.pipeline.front.client import Client, ClientError


def client(answer: httpx.Response) -> Client:
    return Client("http://night.example/jobs", httpx.MockTransport(lambda _: answer))


def test_an_address_that_is_none() -> None:
    with pytest.raises(ClientError, match="not the URL of an API"):
        Client("http://night.example:port")
    with Client("localhost:8000") as without_scheme, pytest.raises(ClientError):
        without_scheme.job("job_1")


@pytest.mark.parametrize("body", [b"<html>busy</html>", b'["list"]', b""])
def test_an_answer_of_somebody_else(body: bytes) -> None:
    with (
        client(httpx.Response(502, content=body)) as made,
        pytest.raises(ClientError, match=r"http://night\.example/jobs/v1/jobs/job_1: 502 Bad Gat"),
    ):
        made.job("job_1")


def test_a_refusal_is_told_in_the_apis_words() -> None:
    refusal = {"error": {"code": "unknown_job", "message": "there is no job 'x'", "param": None}}
    with (
        client(httpx.Response(404, json=refusal)) as made,
        pytest.raises(ClientError, match="404: there is no job 'x'"),
    ):
        made.cancel("x")


def test_calls_are_those_of_the_api(tmp_path: Path) -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(f"{request.method} {request.url.raw_path.decode()}")
        return httpx.Response(200, json={})

    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    with Client("http://night.example", httpx.MockTransport(answer)) as made:
        made.submit(source)
        made.submit(source, completion_window="24h", priority=3)
        made.pause("job_1")
        made.resume("job_1")
        made.retry("job_1")
    assert seen == [
        "POST /v1/jobs",
        "POST /v1/jobs?priority=3&completion_window=24h",
        "POST /v1/jobs/job_1/pause",
        "POST /v1/jobs/job_1/resume",
        "POST /v1/jobs/job_1/retry",
    ]


@pytest.mark.parametrize(
    ("finished_at", "order"), [(None, "landed"), ("2026-11-21T00:00:00Z", "row")]
)
def test_results_are_read_page_by_page_to_the_last(finished_at: str | None, order: str) -> None:
    asked: list[dict[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/results"):
            return httpx.Response(200, json={"finished_at": finished_at})
        asked.append(dict(request.url.params))
        after = int(request.url.params["after"])
        page = {"data": [{"custom_id": str(after)}], "next_after": after + 7, "has_more": after < 9}
        return httpx.Response(200, json=page)

    with Client("http://night.example", httpx.MockTransport(answer)) as made:
        lines = list(made.results("job_1", outcome="failed"))
    assert [line["custom_id"] for line in lines] == ["-1", "6", "13"]
    assert {(query["order"], query["outcome"]) for query in asked} == {(order, "failed")}


def test_a_job_id_stays_one_part_of_the_path() -> None:
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path)
        return httpx.Response(200, json={})

    with Client("http://night.example", httpx.MockTransport(answer)) as made:
        made.job("../../health")
    assert seen == [b"/v1/jobs/..%2F..%2Fhealth"]


@pytest.mark.parametrize("given", ["night-key", "  night-key\n"])
def test_the_key_of_the_environment_is_sent(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, json={})

    transport = httpx.MockTransport(answer)
    monkeypatch.delenv("NIGHTJAR_API_KEY", raising=False)
    Client("http://night.example", transport).job("job_1")
    monkeypatch.setenv("NIGHTJAR_API_KEY", given)
    Client("http://night.example", transport).job("job_1")
    Client("http://night.example", transport, api_key="own").job("job_1")
    assert seen == [None, "Bearer night-key", "Bearer own"]


@pytest.mark.parametrize("key", ["two words", "밤", "a\x00b"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ClientError, match="NIGHTJAR_API_KEY is no key") as caught:
        Client("http://night.example", api_key=key)
    assert key not in str(caught.value)


def test_a_call_that_came_too_soon_is_sent_again_as_told() -> None:
    limited = httpx.Response(429, headers={"retry-after-ms": "20"}, json={"error": {}})
    answers = [limited, limited, httpx.Response(200, json={"id": "job_1"})]
    transport = httpx.MockTransport(lambda _: answers.pop(0))
    began_at = time.monotonic()
    with Client("http://night.example", transport) as made:
        assert made.job("job_1") == {"id": "job_1"}
    assert 0.04 <= time.monotonic() - began_at < 5
    assert answers == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"retry-after-ms": "60001"},
        {"retry-after-ms": "soon"},
        {"retry-after-ms": "20", "x-should-retry": "false"},
    ],
)
def test_a_refusal_that_will_last_is_told_at_once(headers: dict[str, str]) -> None:
    error = {"error": {"code": "insufficient_quota", "message": "used up"}}
    with (
        client(httpx.Response(429, headers=headers, json=error)) as made,
        pytest.raises(ClientError, match="429: used up"),
    ):
        made.job("job_1")


def test_a_file_that_was_read_is_not_sent_again(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    limited = httpx.Response(429, headers={"retry-after-ms": "1"}, json={"error": "slow"})
    with client(limited) as made, pytest.raises(ClientError, match="429: slow"):
        made.submit(source)


def test_who_has_no_key_is_told_where_commands_read_it() -> None:
    error = {"error": {"message": "this API needs a key"}}
    with (
        client(httpx.Response(401, json=error)) as made,
        pytest.raises(ClientError, match=r"401: .* a key; commands send .*NIGHTJAR_API_KEY"),
    ):
        made.job("job_1")
