"""`nightjar run` with the fake engine: the whole journey without a model."""

import json
from pathlib import Path
from typing import Any

import pytest

from nightjar.pipeline.embedded.workdir import default_workdir, note_written
from tests.processes import (
    completion_line,
    nightjar,
    nightjar_here,
    read_lines,
    rerank_line,
    told,
    write_lines,
)


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTJAR_ENGINE", "fake")
    monkeypatch.setenv("NIGHTJAR_MICRO_BATCH_REQUESTS", "7")


def run(source: Path, model: Path, out: Path) -> int:
    return nightjar("run", source, "--model", model, "--out", out).returncode


@pytest.mark.slow
def test_answers_are_the_same_in_every_run(tiny_model: Path, tmp_path: Path) -> None:
    lines: list[Any] = [
        completion_line(f"text-{n}", prompt=f"안녕 {n}", max_tokens=1 + n % 9) for n in range(40)
    ]
    lines += [rerank_line(f"rank-{n}", query=f"q {n}", documents=[" a", " b c"]) for n in range(9)]
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert run(write_lines(tmp_path / "in.jsonl", lines), tiny_model, first) == 0
    assert run(write_lines(tmp_path / "turned.jsonl", lines[::-1]), tiny_model, second) == 0
    assert told(first) == told(second)
    assert len(told(first)) == 49
    texts = {answer[0]["text"] for answer, _ in told(first).values() if "text" in answer[0]}
    assert len(texts) > 30


@pytest.mark.slow
def test_poison_that_raises_costs_its_own_row(tiny_model: Path, tmp_path: Path) -> None:
    lines: list[Any] = [completion_line(f"row-{n}", prompt=f"hello {n}") for n in range(20)]
    lines[11] = completion_line("poison", prompt="hello <poison:raise>")
    out = tmp_path / "out.jsonl"
    assert run(write_lines(tmp_path / "in.jsonl", lines), tiny_model, out) == 3
    assert set(told(out)) == {f"row-{n}" for n in range(20)} - {"row-11"}
    (failed,) = read_lines(tmp_path / "out.errors.jsonl")
    assert failed["custom_id"] == "poison"
    assert failed["response"]["body"]["error"]["code"] == "internal_error"

    # A run that the version before has finished, with its shape of errors, stays finished.
    errors = tmp_path / "out.errors.jsonl"
    old = {"code": "internal_error", "message": "raised", "param": None, "line": 12}
    errors.write_text(json.dumps({**failed, "response": None, "error": old}) + "\n")
    note_written(default_workdir(out), out)
    again = nightjar_here("run", tmp_path / "in.jsonl", "--model", tiny_model, "--out", out)
    assert (again.returncode, read_lines(errors)[0]["error"]) == (3, old)
    assert "already finished" in again.stderr
