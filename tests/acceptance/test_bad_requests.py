"""Requests that nothing could compute, through the public entries: each is refused with its
reason, and those around it get the answers that they get alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from nightjar.jobs.api import create_app
from nightjar.jobs.store import Store
from tests.processes import completion_line, nightjar, read_lines, rerank_line, write_lines

GOOD = [
    completion_line("text", prompt="안녕하세요", max_tokens=9),
    completion_line("samples", prompt="hello", max_tokens=5, n=2, temperature=1),
    completion_line("beams", prompt="hello", max_tokens=5, beam_width=3),
    rerank_line("ranking", query="추천:", documents=[" 된장찌개", " 비빔밥", " 냉면"]),
]
# Line, the field that is named (none where the line is no JSON), words of the reason.
REFUSED_AT_SUBMISSION: list[tuple[dict[str, Any], str | None, str]] = [
    (completion_line("nan", prompt="a", temperature=float("nan")), None, "holds NaN"),
    (completion_line("hot", prompt="a", temperature=1e39), "body.temperature", "to 2"),
    (completion_line("stops", prompt="a", stop=["a"] * 10_000), "body.stop", "10000 texts"),
    (completion_line("long stop", prompt="a", stop="a" * 1_000_000), "body.stop", "1024 bytes"),
    (completion_line("n", prompt="a", n=1_000_000, temperature=1), "body.n", "1 to 128"),
    (completion_line("same", prompt="a", n=2), "body.n", "every text is the same"),
    (completion_line("min", prompt="a", min_tokens=9), "body.min_tokens", "more than max_tokens"),
    (
        completion_line("drawn beams", prompt="a", beam_width=2, temperature=1),
        "body.temperature",
        "beam_width",
    ),
    (rerank_line("empty", query="a", documents=["b", ""]), "body.documents", "document 1 is empty"),
    (rerank_line("none", query="a", documents=[]), "body.documents", "at least one"),
]
REFUSED_BY_THE_MODEL: list[tuple[dict[str, Any], str | None, str]] = [
    (
        rerank_line("long document", query="a", documents=["b", "가 " * 100_000]),
        "body.documents[1]",
        "past the model's context of 128",
    ),
    (
        completion_line("too many", prompt="a", max_tokens=200),
        "body.max_tokens",
        "past the model's context of 128",
    ),
    (completion_line("strange id", prompt=[600]), "body.prompt[0]", "0 to 511"),
]


def answers(path: Path) -> dict[str, Any]:
    """What each request was answered, without its number and the time."""
    return {
        line["custom_id"]: {
            name: value
            for name, value in line["response"]["body"].items()
            if name not in ("id", "created")
        }
        for line in read_lines(path)
    }


@pytest.mark.slow
def test_bad_requests_in_a_file_leave_their_neighbours_untouched(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTJAR_ENGINE", "fake")  # no bad request gets to the engine
    bad = REFUSED_AT_SUBMISSION + REFUSED_BY_THE_MODEL
    mixed = [line for line, _, _ in bad]
    for place, line in enumerate(GOOD):
        mixed.insert(4 * place, line)
    found = []
    for name, lines in (("alone", GOOD), ("mixed", mixed)):
        source = write_lines(tmp_path / f"{name}.jsonl", [*lines])
        out = tmp_path / f"{name}.out.jsonl"
        done = nightjar("run", source, "--model", tiny_model, "--out", out)
        assert done.returncode == (0 if lines is GOOD else 3), done.stderr
        found.append(answers(out))
    assert found[0].keys() == {line["custom_id"] for line in GOOD}
    assert found[1] == found[0]
    errors = {
        line["custom_id"]: line["response"]["body"]["error"]
        for line in read_lines(tmp_path / "mixed.out.errors.jsonl")
    }
    assert errors.keys() == {line["custom_id"] for line, _, _ in bad}
    for line, param, words in bad:
        error = errors[line["custom_id"]]
        assert error["param"] == param
        assert words in error["message"]
        assert len(error["message"]) < 400


@pytest.mark.slow
def test_a_request_that_the_cache_can_never_hold_names_the_setting(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTJAR_KV_CACHE_BYTES", "16384")  # one block
    lines = [
        completion_line("short", prompt="a", max_tokens=9),
        completion_line("long", prompt="a", max_tokens=60),
    ]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    nightjar("run", source, "--model", tiny_model, "--out", out, "--dtype", "fp32")
    assert answers(out).keys() == {"short"}
    (refused,) = read_lines(tmp_path / "out.errors.jsonl")
    told = refused["response"]["body"]["error"]
    assert (refused["custom_id"], told["code"]) == ("long", "cache_exceeded")
    assert "raise NIGHTJAR_KV_CACHE_BYTES" in told["message"]


def test_bad_requests_in_an_upload_leave_their_neighbours_untouched(store: Store) -> None:
    lines = [GOOD[0], *(line for line, _, _ in REFUSED_AT_SUBMISSION), GOOD[3]]
    body = b"\n".join(json.dumps(line).encode() for line in lines)
    with TestClient(create_app(store, lambda job_id: None, served_model="tiny")) as client:
        response = client.post(
            "/v1/jobs", content=body, headers={"content-type": "application/jsonl"}
        )
    job = response.json()
    assert (job["accepted"], job["rejected"]) == (2, len(REFUSED_AT_SUBMISSION))
    failures = store.results.read(job["id"])
    for failure, (line, param, words) in zip(failures, REFUSED_AT_SUBMISSION, strict=True):
        assert failure.custom_id == line["custom_id"]
        assert failure.error is not None
        assert failure.error.param == param
        assert words in failure.error.message
