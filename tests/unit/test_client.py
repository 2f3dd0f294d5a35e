"""What the client says when what answers is not the API."""

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
