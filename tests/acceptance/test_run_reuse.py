"""`nightjar run` over equal requests: what was computed is not computed again, and says so."""

from pathlib import Path
from typing import Any

import pytest

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


def run(source: Path, model: Path, out: Path, *options: str | Path) -> str:
    done = nightjar("run", source, "--model", model, "--out", out, *options)
    assert done.returncode == 0, done.stderr
    return done.stderr


def reused(out: Path) -> dict[str, str]:
    """Where the answers come from that were not computed for their rows."""
    bodies = {line["custom_id"]: line["response"]["body"] for line in read_lines(out)}
    assert len({body["id"] for body in bodies.values()}) == len(bodies)
    return {name: body["reused"] for name, body in bodies.items() if "reused" in body}


def lines(start: int, end: int) -> list[Any]:
    """Completions, drawn texts and rankings, told apart by their numbers."""
    asked: list[Any] = []
    for n in range(start, end):
        asked.append(completion_line(f"text-{n}", prompt=f"안녕 {n}"))
        asked.append(completion_line(f"drawn-{n}", prompt=f"p {n}", temperature=1))
        asked.append(rerank_line(f"rank-{n}", query=f"q {n}", documents=[" a", " b c"]))
    return asked


@pytest.mark.slow
def test_equal_rows_of_a_file_are_computed_once(tiny_model: Path, tmp_path: Path) -> None:
    rows = [completion_line(f"row-{n}", prompt=f"안녕 {n % 5}") for n in range(40)]
    rows += [completion_line(f"drawn-{n}", prompt="p", temperature=1) for n in range(5)]
    alone, together = tmp_path / "alone.jsonl", tmp_path / "together.jsonl"
    said = run(write_lines(tmp_path / "all.jsonl", rows), tiny_model, together)
    assert "35 answers were shared with equal requests" in said
    run(write_lines(tmp_path / "few.jsonl", rows[:5] + rows[40:]), tiny_model, alone)
    assert reused(together) == {f"row-{n}": "job" for n in range(5, 40)}
    assert reused(alone) == {}
    computed, shared = told(alone), told(together)
    for n in range(40):
        assert shared[f"row-{n}"] == computed[f"row-{n % 5}"]
    assert {name: shared[name] for name in computed} == computed
    assert len({str(shared[f"drawn-{n}"]) for n in range(5)}) > 1


@pytest.mark.slow
def test_tonight_pays_for_what_has_changed(tiny_model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "answers.db"
    first, second = (tmp_path / f"{name}.jsonl" for name in ("first", "second"))
    yesterday = write_lines(tmp_path / "yesterday.jsonl", lines(0, 12))
    tonight = write_lines(tmp_path / "tonight.jsonl", lines(4, 16))
    run(yesterday, tiny_model, first, "--reuse-results", cache)
    assert reused(first) == {}
    said = run(tonight, tiny_model, second, "--reuse-results", cache)
    expected = {f"{kind}-{n}" for kind in ("text", "drawn", "rank") for n in range(4, 12)}
    assert reused(second) == dict.fromkeys(expected, "cache")
    before, after = told(first), told(second)
    assert after.keys() == {line["custom_id"] for line in lines(4, 16)}
    assert {name: after[name] for name in expected} == {name: before[name] for name in expected}
    assert "24 answers were shared with equal requests" in said


def ranked(number: int, *documents: int, **more: Any) -> Any:
    texts = [f" d {document} of some length" for document in documents]
    return rerank_line(f"rank-{number}", query=f"q {number % 3}", documents=texts, **more)


@pytest.mark.slow
def test_tonight_pays_for_the_pairs_that_have_changed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTJAR_ENGINE", "model")
    cache = tmp_path / "answers.db"
    first, second, plain = (tmp_path / f"{name}.jsonl" for name in ("first", "second", "plain"))
    yesterday = [ranked(n, *range(n, n + 6)) for n in range(3)]
    tonight = [
        ranked(0, 0, 1, 9, 2),  # one is new
        ranked(1, 9, 3, 6, top_n=1),  # only the best is asked for, one is new
        ranked(2, 4, 5, top_n=2),  # all are known, as parts of another ranking
        ranked(3, 8, 9),  # none is known
        ranked(6, 7, 7, 0),  # twice the same, and new; the third is known
    ]
    write_lines(tmp_path / "yesterday", yesterday)
    write_lines(tmp_path / "tonight", tonight)
    run(tmp_path / "yesterday", tiny_model, first, "--dtype", "fp32", "--reuse-results", cache)
    run(tmp_path / "tonight", tiny_model, second, "--dtype", "fp32", "--reuse-results", cache)
    run(tmp_path / "tonight", tiny_model, plain, "--dtype", "fp32")
    assert told(second) == told(plain)
    assert reused(second) == {"rank-2": "cache"}
    bodies = {line["custom_id"]: line["response"]["body"] for line in read_lines(second)}
    shares = {name: body.get("reused_documents", 0) for name, body in bodies.items()}
    assert shares == {"rank-0": 3, "rank-1": 2, "rank-2": 0, "rank-3": 0, "rank-6": 1}
    # And what was found in parts is found as a whole the next night.
    third = tmp_path / "third.jsonl"
    run(tmp_path / "tonight", tiny_model, third, "--dtype", "fp32", "--reuse-results", cache)
    assert told(third) == told(plain)
    assert set(reused(third)) == set(bodies)
    assert not any("reused_documents" in line["response"]["body"] for line in read_lines(third))


def test_a_file_that_holds_no_answers_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", lines(0, 1))
    out = tmp_path / "out.jsonl"
    options = ("--reuse-results", source)
    done = nightjar_here("run", source, "--model", tiny_model, "--out", out, *options)
    assert done.returncode == 2
    assert f"--reuse-results {source}" in done.stderr
    assert source.read_bytes().startswith(b'{"custom_id"')
