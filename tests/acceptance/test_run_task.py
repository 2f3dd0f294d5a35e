"""`nightjar run task.toml`: from a table to a table, resumed, changed and refused."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from tests.processes import NIGHTJAR, nightjar, nightjar_here, read_lines, wait_until
from tests.tasks import PROMPT, write_rows, write_task


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTJAR_ENGINE", "fake")


def task_of(folder: Path, model: Path, request: str = PROMPT, **task: Any) -> Path:
    """A task whose model is named relative to the file, with a sink beside it."""
    (folder / "model").symlink_to(model)
    return with_model(write_task(folder, request, **task))


def with_model(path: Path, more: str = "") -> Path:
    text = path.read_text(encoding="utf-8")
    path.write_text(f'model = "model"\n{more}\n{text}', encoding="utf-8")
    return path


SINK = '[parameters]\nmax_tokens = 4\n[sink]\nparquet = "answers.parquet"'


def answers(folder: Path) -> dict[int, dict[str, Any]]:
    return {row["id"]: row for row in pq.read_table(folder / "answers.parquet").to_pylist()}


def test_a_table_of_answers_follows_the_table_of_rows(tiny_model: Path, tmp_path: Path) -> None:
    def write(day: str, **columns: list[Any]) -> None:
        write_rows(tmp_path, columns | {"day": [day] * len(columns["id"])})

    write("Monday", id=[3, 1, 2, 3], review=["a", None, "c", "d"])
    task = task_of(tmp_path, tiny_model, more=SINK)
    greedy = SINK.replace("max_tokens = 4", "max_tokens = 4\ntemperature = 0")
    dated, key = 'prompt = "{day}: {review}"', '["id"]\ncontent = ["review"]'
    with_model(write_task(tmp_path, dated, key=key, more=greedy), 'reuse_results = "kept.db"')
    done = nightjar("run", task)
    assert done.returncode == 3, done.stderr
    first = answers(tmp_path)
    assert {id_: row["error_code"] for id_, row in first.items()} == {
        1: "invalid_row",
        2: None,
        3: None,
    }
    assert "column 'review': is null" in first[1]["error_message"]
    assert first[2]["text"]
    assert f"results: {tmp_path / 'answers.parquet'}" in done.stderr.replace("\n", "")
    assert "2 succeeded, 2 failed" in done.stderr
    assert "without 1 rows that have no key of their own" in done.stderr

    again = nightjar_here("run", task)
    assert "already finished" in again.stderr

    # The next night: other rows, another day in every prompt, and the same command.
    write("Tuesday", id=[2, 7], review=["c", "e"])
    done = nightjar("run", task, "--json")
    assert done.returncode == 0, done.stderr
    assert answers(tmp_path).keys() == {2, 7}
    assert answers(tmp_path)[2]["text"] == first[2]["text"]
    assert "1 answers were shared" in done.stderr
    told = json.loads(done.stdout)
    counted = [told[name] for name in ("state", "rows", "succeeded", "failed", "reused")]
    assert counted == ["completed", 2, 2, 0, 1]
    assert told["results"] == str(tmp_path / "answers.parquet")
    assert Path(told["report"]).is_file()


@pytest.mark.slow
def test_a_task_that_changed_after_a_run_was_stopped(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"id": list(range(40)), "review": [f"r{n}" for n in range(40)]}
    rows = write_rows(tmp_path, columns)
    task = task_of(tmp_path, tiny_model, more=SINK)
    monkeypatch.setenv("NIGHTJAR_FAKE_STEP_S", "0.5")
    running = subprocess.Popen([*NIGHTJAR, "run", str(task)], stderr=subprocess.PIPE, text=True)
    log = tmp_path / "task.toml.work" / "logs" / "beat.log"  # of the service that starts last
    wait_until("the services", lambda: log.is_file() and log.stat().st_size > 0)
    services = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGINT)
    time.sleep(0.2)
    running.send_signal(signal.SIGINT)  # somebody is impatient
    told = running.communicate(timeout=60)[1]
    assert told.count("run the same command again") == 1
    assert "Traceback" not in told
    assert running.returncode == 130
    assert len(services) >= 4
    _, alive = psutil.wait_procs(services, timeout=20)
    assert alive == []
    assert not (tmp_path / "answers.parquet").exists()

    monkeypatch.setenv("NIGHTJAR_FAKE_STEP_S", "0")
    kept = task.read_text(encoding="utf-8")
    task.write_text(kept.replace("{review}", "{review}!"), encoding="utf-8")
    refused = nightjar_here("run", task)
    assert refused.returncode == 2
    assert "belongs to another run: the task's request has changed since" in refused.stderr
    task.write_text(kept, encoding="utf-8")
    times = rows.stat().st_mtime_ns
    os.utime(rows, ns=(times, times + 1_000))
    refused = nightjar_here("run", task)
    assert refused.returncode == 2
    assert "the source has changed since" in refused.stderr

    os.utime(rows, ns=(times, times))
    done = nightjar("run", task)
    assert done.returncode == 0, done.stderr
    assert answers(tmp_path).keys() == set(range(40))
    assert "continuing: " in done.stderr


@pytest.mark.slow
def test_json_lines_in_and_out_without_a_sink(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "docs": ["x", "y"]}\n{"id": "b"}\n{\n')
    request = 'query = "q"\ndocuments = {column = "docs"}'
    task = task_of(tmp_path, tiny_model, request, kind="rank", source='jsonl = "rows.jsonl"')
    done = nightjar("run", task, "--out", tmp_path / "out.jsonl")
    assert done.returncode == 3, done.stderr
    (line,) = read_lines(tmp_path / "out.jsonl")
    assert line["custom_id"] == "a"
    assert len(line["response"]["body"]["results"]) == 2
    told = [line["response"]["body"]["error"] for line in read_lines(tmp_path / "out.errors.jsonl")]
    assert [one["line"] for one in told] == [2, 3]
    assert "broken JSON" in told[1]["message"]


def invoke(*arguments: str | Path) -> tuple[int, str]:
    done = nightjar_here(*arguments)
    return done.returncode, done.stderr


def test_a_task_that_cannot_be_run(tiny_model: Path, tmp_path: Path) -> None:
    write_rows(tmp_path, {"id": [1], "review": ["a"]})
    task = task_of(tmp_path, tiny_model)
    assert invoke("run", task)[0] == 2
    assert "has no [sink]; add one, or give --out" in invoke("run", task)[1]
    with_model(write_task(tmp_path, more=SINK))
    assert "leave --out out" in invoke("run", task, "--out", tmp_path / "o.jsonl")[1]
    with_model(write_task(tmp_path, 'prompt = "{reviw}"', more=SINK))
    assert "did you mean 'review'?" in invoke("run", task)[1]
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with_model(write_task(tmp_path, more=SINK))
    code, told = invoke("run", task)
    assert (code, "is cut off" in told) == (2, True)
    write_rows(tmp_path, {"id": [1], "review": ["a"]})
    (tmp_path / "answers.parquet").write_text("somebody's own")
    code, told = invoke("run", task)
    assert (code, "[sink]" in told, "move it away" in told) == (2, True, True)
    write_task(tmp_path, more=SINK)
    assert "names no model" in invoke("run", task)[1]
    assert "give --model" in invoke("run", tmp_path / "x.jsonl", "--out", tmp_path / "o.jsonl")[1]
    assert invoke("run", tmp_path / "none.toml")[0] == 2
    assert not (tmp_path / "task.toml.work" / "nightjar.db").exists()


def test_rows_that_are_all_bad_are_taken_for_a_wrong_task(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTJAR_BAD_LINES_IN_A_ROW", "50")
    write_rows(tmp_path, {"id": list(range(99)), "review": [None] * 98 + ["a"]})
    code, told = invoke("run", task_of(tmp_path, tiny_model, more=SINK))
    assert code == 2
    assert "has 50 rows in a row that cannot be used; the first: line 1, column 'review'" in told
    assert "correct the task or its source" in told
