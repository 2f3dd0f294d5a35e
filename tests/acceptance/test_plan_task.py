"""`nightjar plan`: what a task will cost, without computing."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from nightjar.pipeline.embedded.workdir import Speed
from nightjar.pipeline.front.cli import app
from nightjar.pipeline.front.task_plan import TaskPlan, forecast, plan_lines
from tests.tasks import write_rows, write_task


def plan(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_rows_tokens_buckets_and_bad_rows(tiny_model: Path, tmp_path: Path) -> None:
    texts = ["hi"] * 6 + ["hello world " * 8] * 2 + ["far too long " * 200, None]
    write_rows(tmp_path, {"id": [0, 1, 2, 3, 4, 4, 6, 7, 8, 9], "review": texts})
    task = write_task(tmp_path, more="[parameters]\nmax_tokens = 5\nn = 2")
    done = plan(task, "--model", tiny_model)
    assert done.exit_code == 3, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "10 rows: 8 requests, 2 that cannot be used"
    assert "at most 80 answer tokens" in lines[1]
    buckets = [line.split() for line in lines if line.startswith("  to ")]
    assert [(one[1], one[3], len(one[4])) for one in buckets] == [("32", "6", 40), ("128", "2", 13)]
    assert "expected time: not known before a first run" in lines
    assert "the first such row is number 6 of" in done.stdout
    assert "line 10, column 'review': is null" in done.stdout
    assert "line 9: the prompt has" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.parquet", "task.toml"]


def test_prompt_vectors_are_read_from_their_files(tiny_model: Path, tmp_path: Path) -> None:
    write_rows(tmp_path, {"id": [1], "review": ["<|PROMPT|>"]})
    save_file({"v": np.ones((7, 32), np.float32)}, tmp_path / "v.safetensors")
    task = write_task(tmp_path)
    text = task.read_text(encoding="utf-8")
    task.write_text('prompt_vector = "v"\n' + text + '[prompt_vectors]\nv = "v.safetensors"\n')
    done = plan(task, "--model", tiny_model)
    assert (done.exit_code, "7 prompt tokens" in done.stdout) == (0, True), done.stderr
    task.write_text('prompt_vector = "v"\n' + text)
    assert plan(task, "--model", tiny_model).exit_code == 4


def test_the_last_run_tells_the_time() -> None:
    found = TaskPlan(rows=36_000)

    def told(speed: Speed, price: float | None = None) -> str:
        return "\n".join(plan_lines(found, forecast(found, speed, price)))

    assert "expected time: 1 h 40 min, at the 6.0 requests/s" in told(Speed(600, 100.0, 1))
    assert "expected cost" not in told(Speed(600, 100.0, 1))
    assert "expected cost: 4.17, at 2.5 an hour" in told(Speed(600, 100.0, 1), 2.5)
    assert "expected time: 36 s" in told(Speed(1000, 1.0, 1))
    assert "of the last run, which reused 990 of its answers" in told(Speed(1000, 1.0, 1, 990))


def test_a_key_that_repeats_is_a_row_that_fails(tiny_model: Path, tmp_path: Path) -> None:
    write_rows(tmp_path, {"id": [1, 1], "review": ["a", "b"]})
    done = plan(write_task(tmp_path), "--model", tiny_model)
    assert (done.exit_code, "keys repeat" in done.stdout) == (3, True)


def test_programs_read_the_plan_as_json(tiny_model: Path, tmp_path: Path) -> None:
    write_rows(tmp_path, {"id": [1, 1, 2], "review": ["hi", "hi", None]})
    task = write_task(tmp_path, more="[parameters]\nmax_tokens = 5")
    done = plan(task, "--model", tiny_model, "--json")
    assert done.exit_code == 3, done.stderr
    found = json.loads(done.stdout)
    counted = {"rows": 3, "requests": 2, "bad": 1, "first_repeat": 2, "expected": None}
    assert {name: found[name] for name in counted} == counted
    assert found["buckets"] == [{"to": 32, "requests": 2}]
    assert found["most_answer_tokens"] == 10
    assert "is null" in found["first_bad"][0]
    (tmp_path / "task.toml.work").mkdir()
    speed = {"requests": 10, "seconds": 5.0, "tokens": 100}  # as an earlier version wrote it
    (tmp_path / "task.toml.work" / "speed.json").write_text(json.dumps(speed))
    done = plan(task, "--model", tiny_model, "--json", "--price-per-hour", "3600")
    assert json.loads(done.stdout)["expected"] == {
        "seconds": 1.0,
        "cost": 1.0,
        "requests_per_second": 2.0,
        "reused_share": 0.0,
    }


def test_a_task_that_cannot_be_planned(tiny_model: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path, 'prompt = "{nobody}"')
    assert plan(task).exit_code == 2
    told = plan(task, "--model", tiny_model)
    assert (told.exit_code, "no such file" in told.stderr) == (2, True)


def test_the_schema_is_json() -> None:
    done = CliRunner().invoke(app, ["task", "schema"])
    assert json.loads(done.stdout)["title"] == "Nightjar task file"
