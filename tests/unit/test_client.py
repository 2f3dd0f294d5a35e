"""What the client sends, and what it says when what answers is not the API."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

import nightjar
from nightjar import (
    AsyncClient,
    AsyncJob,
    AsyncOpenJob,
    AsyncSchedules,
    Client,
    ClientError,
    Job,
    OpenJob,
    RefusedError,
    Schedules,
    UnfinishedError,
    UnreachableError,
)
from nightjar.pipeline.client.options import SubmitOptions, check_options

JOB = {
    "id": "job_1",
    "state": "queued",
    "model": "tiny",
    "counts": {"total": 1, "completed": 0, "failed": 0, "cancelled": 0},
    "usage": {"prompt_tokens": 0, "generated_tokens": 0},
    "created_at": 1.0,
    "of_a_newer_api": {},
}
URL = "http://night.example"


def client(answer: httpx.Response, retries: int = 0) -> Client:
    transport = httpx.MockTransport(lambda _: answer)
    return Client(f"{URL}/jobs", transport=transport, retries=retries)


def recorded(seen: list[httpx.Request]) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        request.read()
        seen.append(request)
        return httpx.Response(200, json=JOB)

    return httpx.MockTransport(answer)


def test_the_package_stays_light_and_gives_the_names_of_the_client() -> None:
    code = (
        "import sys, nightjar; before = {'httpx', 'pydantic', 'msgspec'} & set(sys.modules);"
        "from nightjar import Client, Generate; after = {'pandas', 'polars', 'pyarrow', 'torch',"
        "'sqlalchemy', 'celery'} & set(sys.modules); sys.exit(str(before | after))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"
    assert {name for name in nightjar.__all__ if not hasattr(nightjar, name)} == set()
    assert set(nightjar.__all__) <= set(dir(nightjar))
    with pytest.raises(AttributeError, match="no attribute 'Clientele'"):
        nightjar.Clientele  # noqa: B018


def test_an_address_that_is_none() -> None:
    with pytest.raises(ClientError, match="not the URL of an API"):
        Client("http://night.example:port")
    with Client("localhost:8000") as without_scheme, pytest.raises(UnreachableError):
        without_scheme.job("job_1").status()


@pytest.mark.parametrize("body", [b"<html>busy</html>", b'["list"]', b""])
def test_an_answer_of_somebody_else(body: bytes) -> None:
    with (
        client(httpx.Response(502, content=body)) as made,
        pytest.raises(
            UnreachableError, match=r"http://night\.example/jobs/v1/jobs/job_1: 502 Bad Gat"
        ),
    ):
        made.job("job_1").status()


@pytest.mark.parametrize("answer", [{"id": "job_1"}, {**JOB, "counts": 5}, {"data": [1]}])
def test_an_answer_of_another_version(answer: object) -> None:
    with client(httpx.Response(200, json=answer)) as made:
        with pytest.raises(UnreachableError, match="not one of Nightjar's API"):
            made.job("job_1").status()
        with pytest.raises(UnreachableError, match="not one of Nightjar's API"):
            made.models()


def test_a_refusal_is_told_in_the_apis_words() -> None:
    refusal = {"error": {"code": "unknown_job", "message": "there is no job 'x'", "param": None}}
    with (
        client(httpx.Response(404, json=refusal)) as made,
        pytest.raises(RefusedError, match="404: there is no job 'x'") as caught,
    ):
        made.job("x").cancel()
    assert (caught.value.status, caught.value.code, caught.value.param) == (
        404,
        "unknown_job",
        None,
    )


def test_calls_are_those_of_the_api(tmp_path: Path) -> None:
    seen: list[httpx.Request] = []
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    with Client(URL, transport=recorded(seen)) as made:
        made.submit(source)
        options: SubmitOptions = {"completion_window": "24h", "priority": 3, "model": "a b"}
        job = made.submit(
            str(source),
            wait_for_model=True,
            metadata={"밤": "1"},
            idempotency_key="night",
            **options,
        )
        for steer in (job.pause, job.resume, job.retry):
            assert steer().id == "job_1"
    assert [f"{request.method} {request.url.raw_path.decode()}" for request in seen] == [
        "POST /v1/jobs",
        "POST /v1/jobs?priority=3&completion_window=24h&model=a+b&wait_for_model=true"
        "&metadata=%7B%22%EB%B0%A4%22%3A%221%22%7D",
        "POST /v1/jobs/job_1/pause",
        "POST /v1/jobs/job_1/resume",
        "POST /v1/jobs/job_1/retry",
    ]
    assert [request.content for request in seen[:2]] == [b"{}", b"{}"]
    first, second = (request.headers["idempotency-key"] for request in seen[:2])
    assert len(first) > 30
    assert second == "night"
    assert seen[0].headers["content-length"] == "2"
    assert job.submitted is not None
    assert (job.submitted.counts.total, job.submitted.raw) == (1, JOB)


def test_an_option_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"no option 'modle'; it has .*model"):
        check_options({"modle": "tiny"})  # type: ignore[typeddict-unknown-key]
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    with Client(URL) as made:
        with pytest.raises(ClientError, match="template: a file of batch lines is sent as it is"):
            made.submit(source, template="{a}")
        with pytest.raises(ClientError, match="missing: No such file"):
            made.submit(tmp_path / "missing")
        os.mkfifo(tmp_path / "pipe")
        held = os.open(tmp_path / "pipe", os.O_RDWR)
        with pytest.raises(ClientError, match=r"pipe: .*not seekable.*; give the path"):
            made.submit(tmp_path / "pipe")
        os.close(held)


@pytest.mark.parametrize(("finished_at", "order"), [(None, "landed"), (1_790_000_000, "row")])
def test_results_are_read_page_by_page_to_the_last(finished_at: int | None, order: str) -> None:
    asked: list[dict[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/results"):
            return httpx.Response(200, json=JOB | {"finished_at": finished_at})
        asked.append(dict(request.url.params))
        after = int(request.url.params["after"])
        error = {"code": "batch_expired", "message": "too late"}
        line = {"id": "r", "custom_id": str(after), "response": None, "error": error}
        page = {"data": [line], "next_after": after + 7, "has_more": after < 9, "complete": False}
        return httpx.Response(200, json=page)

    with Client(URL, transport=httpx.MockTransport(answer)) as made:
        found = list(made.job("job_1").results(outcome="failed"))
    assert [one.custom_id for one in found] == ["-1", "6", "13"]
    assert {(query["order"], query["outcome"]) for query in asked} == {(order, "failed")}


def test_a_job_id_stays_one_part_of_the_path() -> None:
    seen: list[httpx.Request] = []
    with Client(URL, transport=recorded(seen)) as made:
        made.job("../../health").status()
        with pytest.raises(ClientError, match="the id of a job is empty"):
            made.job("").status()
    assert [request.url.raw_path for request in seen] == [b"/v1/jobs/..%2F..%2Fhealth"]


@pytest.mark.parametrize("given", ["night-key", "  night-key\n"])
def test_the_key_of_the_environment_is_sent(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[httpx.Request] = []
    monkeypatch.delenv("NIGHTJAR_API_KEY", raising=False)
    monkeypatch.setenv("NIGHTJAR_API", URL)
    Client(transport=recorded(seen)).job("job_1").status()
    monkeypatch.setenv("NIGHTJAR_API_KEY", given)
    Client(transport=recorded(seen)).job("job_1").status()
    Client(transport=recorded(seen), api_key="own").job("job_1").status()
    keys = [request.headers.get("authorization") for request in seen]
    assert keys == [None, "Bearer night-key", "Bearer own"]
    assert {request.url.host for request in seen} == {"night.example"}


@pytest.mark.parametrize("key", ["two words", "밤", "a\x00b"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ClientError, match="NIGHTJAR_API_KEY is no key") as caught:
        Client(URL, api_key=key)
    assert key not in str(caught.value)


@pytest.mark.parametrize("headers", [{"retry-after-ms": "20"}, {"retry-after": "0"}])
def test_a_call_that_came_too_soon_is_sent_again_as_told(headers: dict[str, str]) -> None:
    limited = httpx.Response(429, headers=headers, json={"error": {}})
    answers = [limited, limited, httpx.Response(200, json=JOB)]
    transport = httpx.MockTransport(lambda _: answers.pop(0))
    began_at = time.monotonic()
    with Client(URL, transport=transport, retries=0) as made:
        assert made.job("job_1").status().id == "job_1"
    least_s = 2 * int(headers.get("retry-after-ms", 0)) / 1_000
    assert least_s <= time.monotonic() - began_at < 5
    assert answers == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"retry-after-ms": "60001"},
        {"retry-after": "61"},
        {"retry-after-ms": "soon"},
        {"retry-after-ms": "20", "x-should-retry": "false"},
    ],
)
def test_a_refusal_that_will_last_is_told_at_once(headers: dict[str, str]) -> None:
    error = {"error": {"code": "insufficient_quota", "message": "used up"}}
    with (
        client(httpx.Response(429, headers=headers, json=error), retries=3) as made,
        pytest.raises(RefusedError, match="429: used up"),
    ):
        made.job("job_1").status()


def test_a_long_wait_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    limited = httpx.Response(429, headers={"retry-after": "60"}, json={"error": "full"})
    answers = [limited, httpx.Response(200, json=JOB)]
    with Client(URL, transport=httpx.MockTransport(lambda _: answers.pop(0))) as made:
        made.job("job_1").status()
    assert slept == [60]
    assert "asks to wait 60 s before GET /v1/jobs/job_1 is sent again" in caplog.text


def test_a_file_that_was_read_is_sent_again_from_its_beginning(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    seen: list[tuple[bytes, str]] = []
    answers = [
        httpx.Response(429, headers={"retry-after-ms": "1"}, json={"error": "slow"}),
        httpx.Response(503, json={"error": "away"}),
        httpx.Response(200, json=JOB),
    ]

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.read(), request.headers["idempotency-key"]))
        return answers.pop(0)

    with Client(URL, transport=httpx.MockTransport(answer), retries=1) as made:
        assert made.submit(source).id == "job_1"
    assert [body for body, _ in seen] == [b"{}"] * 3
    assert len({key for _, key in seen}) == 1


def test_who_has_no_key_is_told_where_commands_read_it() -> None:
    error = {"error": {"message": "this API needs a key"}}
    with (
        client(httpx.Response(401, json=error)) as made,
        pytest.raises(ClientError, match=r"401: .* a key; .*NIGHTJAR_API_KEY.*commands send"),
    ):
        made.job("job_1").status()


def test_a_frame_of_a_job_that_goes_on_is_refused() -> None:
    with (
        client(httpx.Response(200, json=JOB)) as made,
        pytest.raises(UnfinishedError, match=r"0 of 1 rows .*; call wait\(\) first"),
    ):
        made.job("job_1").to_arrow()


@pytest.mark.parametrize(
    ("blocking", "asynchronous"),
    [
        (Client, AsyncClient),
        (Job, AsyncJob),
        (OpenJob, AsyncOpenJob),
        (Schedules, AsyncSchedules),
    ],
)
def test_both_clients_have_the_same_methods(blocking: type, asynchronous: type) -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(blocking) == public(asynchronous)
    assert len(public(blocking)) >= 6
