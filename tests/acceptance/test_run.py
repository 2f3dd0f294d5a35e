"""`nightjar run` as a user meets it: the real command, its files, its exit status, its signals."""

import fcntl
import json
import os
import pty
import re
import sqlite3
import struct
import subprocess
import sys
import termios
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.processes import (
    NIGHTJAR,
    all_ended,
    completion_line,
    find_children,
    nightjar,
    nightjar_here,
    read_lines,
    rerank_line,
    start_nightjar,
    wait_until,
    write_lines,
)

# The installed command: `python -m` would put the current directory before the libraries.
NIGHTJAR_SCRIPT = [str(Path(sys.executable).with_name("nightjar"))]
PROMPTS = ["안녕하세요", "hello world", "오늘 날씨가", "a b c d e f g h i j k l", "🙂 emoji"]


@pytest.fixture(autouse=True)
def small_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small micro-batches, so that a kill meets some done, some computed, some waiting."""
    monkeypatch.setenv("NIGHTJAR_MICRO_BATCH_REQUESTS", "16")


def slow_fake_engine(monkeypatch: pytest.MonkeyPatch, step_s: str = "0.2") -> None:
    """Without a model to load, but so slow that a run can be looked at."""
    monkeypatch.setenv("NIGHTJAR_ENGINE", "fake")
    monkeypatch.setenv("NIGHTJAR_FAKE_STEP_S", step_s)


def run_arguments(source: Path, model: Path, out: Path) -> list[str | Path]:
    return ["run", source, "--model", model, "--out", out]


def many_lines(count: int, max_tokens: int = 40) -> list[dict[str, object]]:
    return [
        completion_line(
            f"row-{n}", prompt=f"{PROMPTS[n % 5]} {n}", max_tokens=max_tokens, ignore_eos=True
        )
        if n % 4
        else rerank_line(f"row-{n}", query=PROMPTS[n % 5], documents=[f" {n}", " b", " c d"])
        for n in range(count)
    ]


def landed(out: Path) -> int:
    """Results in the run's database."""
    database = out.with_name(f"{out.name}.work") / "nightjar.db"
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            return int(connection.execute("select count(*) from result").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def written_seconds(workdir: Path) -> tuple[float, float]:
    """The engine's seconds and those of loading that a run's database holds."""
    with sqlite3.connect(workdir / "nightjar.db") as connection:
        query = "select coalesce(sum(engine_s), 0), coalesce(sum(load_s), 0) from worker"
        engine_s, load_s = connection.execute(query).fetchone()
    return engine_s, load_s


def told_seconds(summary: str) -> tuple[float, float, float, float]:
    """What the summary says: wall time, and of it the engine's, loading and all else."""
    wall = re.search(r"requests in ([\d.]+) s", summary)
    parts = re.search(
        r"time: ([\d.]+) s in the engine, ([\d.]+) s loading the model, ([\d.]+) s else", summary
    )
    assert wall, summary
    assert parts, summary
    engine, load, rest = map(float, parts.groups())
    return float(wall[1]), engine, load, rest


@dataclass(frozen=True)
class Finished:
    """A run that has ended, and what it said."""

    source: Path
    out: Path
    workdir: Path
    said: str

    def again(self, model: Path, out: Path | None = None, *more: str, **other: Path) -> Any:
        """Run it again with some arguments changed: nothing is left to compute."""
        return nightjar_here(*self.arguments(model, out, *more, **other))

    def arguments(
        self, model: Path, out: Path | None = None, *more: str, **other: Path
    ) -> list[str | Path]:
        command = run_arguments(other.get("source", self.source), model, out or self.out)
        return [*command, "--workdir", self.workdir, "--dtype", "fp32", *more]

    def files(self) -> dict[Path, tuple[int, bytes]]:
        """What lies beside the results, and since when."""
        found = self.out.parent.glob("out*.jsonl")
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


RANKED = [" 하늘", " blue sky", " z"]


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    lines = [completion_line(f"g{n}", prompt=text) for n, text in enumerate(PROMPTS)]
    lines.append(rerank_line("r", query="hello world", documents=RANKED))
    source = write_lines(folder / "in.jsonl", [*lines, *many_lines(80)])
    out, workdir = folder / "out.jsonl", folder / "work"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIGHTJAR_MICRO_BATCH_REQUESTS", "16")
        run = nightjar(*Finished(source, out, workdir, "").arguments(tiny_model))
    assert run.returncode == 0, run.stderr
    return Finished(source, out, workdir, run.stderr)


def test_generation_and_ranking_are_those_of_transformers(
    tiny_model: Path, finished: Finished
) -> None:
    assert finished.out.with_suffix(".errors.jsonl").read_text() == ""
    answers = {line["custom_id"]: line["response"]["body"] for line in read_lines(finished.out)}
    assert len(answers) == len(PROMPTS) + 1 + 80

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for n, text in enumerate(PROMPTS):
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
        )[0, ids.shape[1] :]
        choice, usage = answers[f"g{n}"]["choices"][0], answers[f"g{n}"]["usage"]
        assert choice["text"] == tokenizer.decode(whole, skip_special_tokens=True)
        assert usage["completion_tokens"] == len(whole)
        assert usage["requested_tokens"] == 8
        assert usage["saved_tokens"] == 8 - len(whole)
        assert choice["finish_reason"] == ("length" if len(whole) == 8 else "stop")

    results = answers["r"]["results"]
    query = tokenizer("hello world", add_special_tokens=False).input_ids
    expected = {}
    for index, document in enumerate(RANKED):
        ids = tokenizer(document, add_special_tokens=False).input_ids
        log_probs = model(torch.tensor([query + ids])).logits[0].double().log_softmax(-1)
        scores = [log_probs[len(query) + k - 1, token] for k, token in enumerate(ids)]
        expected[index] = -float(torch.stack(scores).mean())
    assert [r["index"] for r in results] == sorted(expected, key=lambda i: expected[i])
    for result in results:
        assert result["mean_nll"] == pytest.approx(expected[result["index"]], rel=1e-4, abs=1e-4)


def test_a_finished_run_says_so_and_changes_nothing(
    tiny_model: Path, finished: Finished, tmp_path: Path
) -> None:
    before = finished.files()
    assert len(before) == 2
    again = finished.again(tiny_model)
    assert again.returncode == 0
    assert "already finished" in again.stderr
    assert finished.files() == before
    changed = write_lines(tmp_path / "in.jsonl", [*read_lines(finished.source)[1:]])
    other = finished.again(tiny_model, source=changed)
    assert other.returncode == 2
    assert (
        "belongs to another run: the input has changed since; give another --workdir"
        in other.stderr
    )
    assert finished.files() == before


def test_it_ends_by_naming_its_report(finished: Finished) -> None:
    """The page holds every plot, the bill, the machine's own limit and the versions."""
    assert finished.said.splitlines()[-1] == f"report: {finished.workdir / 'report.html'}"
    page = (finished.workdir / "report.html").read_text(encoding="utf-8")
    for title in (
        *("Rows by state over time", "Rows computed over time, by kind and bucket"),
        *("rows/s over time", "tokens/s over time", "Requested and generated lengths"),
        *("Lengths of prompts", "tokens prefilled", "tokens saved by stops", "device seconds"),
        *("of its limit was used", "GFLOP/s", "tokenizer.json (SHA-256)", "fp32", "torch"),
    ):
        assert title in page, title
    told = nightjar_here("report", finished.workdir, "--json")
    bill = json.loads(told.stdout)["bill"]
    answers = [line["response"]["body"] for line in read_lines(finished.out)]
    decoded = sum(body["usage"]["completion_tokens"] for body in answers)
    assert bill["rows_computed"] + bill["rows_not_computed"] == len(answers)
    assert 0 < bill["decoded_tokens"] <= decoded  # equal requests were computed once
    assert (bill["tenant"], bill["schedule"]) == ("default", None)
    assert bill["engine_s"] > 0


def test_the_logs_say_nothing_of_idle_ticks(finished: Finished) -> None:
    """Two lines a tick and two a sweep were 790 kB in 21 minutes."""
    logs = finished.workdir / "logs"
    planner, beat = ((logs / f"{name}.log").read_text() for name in ("planner", "beat"))
    assert "ready" in planner
    assert "beat: Starting" in beat
    for text in ("nightjar.sweep[", "nightjar.tick[", "Sending due task"):
        idle = [line for line in (planner + beat).splitlines() if text in line]
        assert all("succeeded" in line and re.search(r": [1-9]", line) for line in idle), idle


@pytest.mark.slow
def test_a_line_that_names_another_model_is_refused_unless_any_is_accepted(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTJAR_ENGINE", "fake")
    lines = [completion_line("other", prompt="a", model="gpt-4o", max_tokens=2)]
    source, out = write_lines(tmp_path / "in.jsonl", [*lines]), tmp_path / "out.jsonl"
    refused = nightjar(*run_arguments(source, tiny_model, out))
    assert refused.returncode == 4, refused.stderr
    assert "the model served here is 'tiny', not 'gpt-4o'" in refused.stderr
    assert "--accept-any-model" in refused.stderr
    # Nothing had succeeded: the same work directory takes the mended run.
    done = nightjar(*run_arguments(source, tiny_model, out), "--accept-any-model")
    assert done.returncode == 0, done.stderr
    assert [line["custom_id"] for line in read_lines(out)] == ["other"]
    other = nightjar_here(*run_arguments(source, tiny_model, out))
    assert other.returncode == 2
    assert "another run: --accept-any-model has changed since" in other.stderr


def test_the_summary_and_every_answer_name_the_precision(finished: Finished) -> None:
    assert "\nprecision: fp32\n" in finished.said
    bodies = [line["response"]["body"] for line in read_lines(finished.out)]
    assert {body["precision"] for body in bodies} == {"fp32"}
    assert {body["object"] for body in bodies} == {"text_completion", "rerank"}


def test_the_summary_tells_the_engines_seconds_from_the_rest(finished: Finished) -> None:
    wall_s, engine_s, load_s, rest_s = told_seconds(finished.said)
    assert 0 < engine_s <= wall_s
    assert 0 < load_s <= wall_s
    assert rest_s > 0
    assert engine_s + load_s + rest_s == pytest.approx(wall_s, abs=0.1)
    assert (engine_s, load_s) == pytest.approx(written_seconds(finished.workdir), abs=0.006)


def test_other_peoples_files_are_not_taken_for_the_results(
    tiny_model: Path, finished: Finished
) -> None:
    right = finished.out.read_text()
    assert len(right.splitlines()) == len(PROMPTS) + 1 + 80
    for stale in (finished.out, finished.out.with_name("other.jsonl")):
        stale.write_text("stale")
        stale.with_suffix(".errors.jsonl").write_text("stale")
        refused = finished.again(tiny_model, stale)
        assert refused.returncode == 2
        assert f"overwrite {stale}" in refused.stderr
        assert stale.read_text() == "stale"
        assert finished.again(tiny_model, stale, "--overwrite").returncode == 0
        assert stale.read_text() == right
        assert stale.with_suffix(".errors.jsonl").read_text() == ""


@pytest.mark.slow
def test_a_killed_worker_costs_nothing(tiny_model: Path, tmp_path: Path) -> None:
    count = 480
    source = write_lines(tmp_path / "in.jsonl", [*many_lines(count)])
    out = tmp_path / "out.jsonl"
    running = start_nightjar(*run_arguments(source, tiny_model, out), log=tmp_path / "log")
    try:
        wait_until("first results", lambda: landed(out) > 0)
        workers = find_children(running.pid, "nightjar.gpu_worker.worker.tasks")
        computes = find_children(running.pid, "nightjar.gpu_worker.compute")
        assert workers
        assert computes
        workers[0].kill()
        assert landed(out) < count
        wait_until("the orphaned compute process to end", lambda: all_ended(computes))
        assert running.wait(180) == 0, (tmp_path / "log").read_text()
    finally:
        running.kill()
        running.wait()
    assert "gpu-worker ended and was started again" in (tmp_path / "log").read_text()
    seen = Counter(line["custom_id"] for line in read_lines(out))
    assert seen == {f"row-{n}": 1 for n in range(count)}


@pytest.mark.slow
def test_a_killed_compute_process_costs_nothing(tiny_model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [*many_lines(320)])
    out = tmp_path / "out.jsonl"
    running = start_nightjar(*run_arguments(source, tiny_model, out), log=tmp_path / "log")
    try:
        wait_until("first results", lambda: landed(out) > 0)
        find_children(running.pid, "nightjar.gpu_worker.compute")[0].kill()
        assert running.wait(180) == 0, (tmp_path / "log").read_text()
    finally:
        running.kill()
        running.wait()
    assert Counter(line["custom_id"] for line in read_lines(out)) == {
        f"row-{n}": 1 for n in range(320)
    }


def test_a_killed_run_goes_on_where_it_was(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A step answers 256 rows: the run is killed before its second one.
    slow_fake_engine(monkeypatch, "1.0")
    count = 480
    source = write_lines(tmp_path / "in.jsonl", [*many_lines(count)])
    out = tmp_path / "out.jsonl"
    running = start_nightjar(*run_arguments(source, tiny_model, out), log=tmp_path / "log")
    wait_until("first results", lambda: landed(out) > 0)
    children = find_children(running.pid, "")
    running.kill()
    running.wait()
    wait_until("every child to end", lambda: all_ended(children))
    assert not out.exists()
    database = tmp_path / "out.jsonl.work" / "nightjar.db"
    query = "select request_id, created_at from result order by request_id"
    with sqlite3.connect(database) as connection:
        before = connection.execute(query).fetchall()
    assert 0 < len(before) < count
    spent_before = written_seconds(database.parent)
    slow_fake_engine(monkeypatch)
    again = nightjar(*run_arguments(source, tiny_model, out), timeout_s=180)
    assert again.returncode == 0, again.stderr
    assert f"{len(before)} of {count} requests are already done" in again.stderr
    wall_s, engine_s, load_s, _ = told_seconds(again.stderr)
    assert engine_s + load_s <= wall_s
    since = [
        after - then
        for after, then in zip(written_seconds(database.parent), spent_before, strict=True)
    ]
    assert [engine_s, load_s] == pytest.approx(since, abs=0.006)
    with sqlite3.connect(database) as connection:
        after = dict(connection.execute(query).fetchall())
    assert [(row, after[row]) for row, _ in before] == before
    assert Counter(line["custom_id"] for line in read_lines(out)) == {
        f"row-{n}": 1 for n in range(count)
    }


def test_term_ends_a_run_in_order(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_fake_engine(monkeypatch)
    source = write_lines(tmp_path / "in.jsonl", [*many_lines(600)])
    out = tmp_path / "out.jsonl"
    running = start_nightjar(*run_arguments(source, tiny_model, out), log=tmp_path / "log")
    try:
        wait_until("first results", lambda: landed(out) > 0)
        children = find_children(running.pid, "")
        running.terminate()
        assert running.wait(60) == 128 + 15
    except subprocess.TimeoutExpired:
        running.kill()
        raise
    assert "run the same command again" in (tmp_path / "log").read_text()
    wait_until("every child to end", lambda: all_ended(children))


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_not_started_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTJAR_KV_CACHE_BYTES", str(1 << 50))
    out = tmp_path / "out.jsonl"
    done = nightjar(*run_arguments(write_lines(tmp_path / "in", many_lines(2)), tiny_model, out))
    assert done.returncode == 1
    told = "nightjar: the gpu-worker cannot start: the model 'tiny': the KV cache is to take "
    assert f"{told}1125899906842624 bytes" in done.stderr
    assert "lower NIGHTJAR_KV_CACHE_BYTES" in done.stderr
    log = out.with_name("out.jsonl.work") / "logs" / "gpu-worker.log"
    assert log.read_text().count("nightjar worker: ") == 1


@pytest.mark.slow
def test_a_hostile_environment_does_no_harm(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' Celery settings, files that shadow libraries, odd paths, a long TMPDIR."""
    place = tmp_path / "50% off? 한글 b"
    place.mkdir()
    for name in ("redis.py", "celery.py", "torch.py"):
        (place / name).write_text("raise SystemExit('the wrong module')")
    deep = tmp_path / ("long-" * 20)
    deep.mkdir()
    for name, value in {
        "CELERY_BROKER_URL": "redis://127.0.0.1:1/0",
        "BROKER_URL": "redis://127.0.0.1:1/0",
        "CELERY_RESULT_BACKEND": "redis://127.0.0.1:1/0",
        "NIGHTJAR_MODEL_NAME": "other",
        "TMPDIR": str(deep),
        "LC_ALL": "C",
    }.items():
        monkeypatch.setenv(name, value)
    source = write_lines(place / "in.jsonl", [*many_lines(3, max_tokens=3)])
    target, link = place / "target.jsonl", place / "out.jsonl"
    link.symlink_to(target)
    command = [*NIGHTJAR_SCRIPT, *run_arguments(source, tiny_model, link)]
    done = subprocess.run(
        command, cwd=place, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert link.is_symlink()
    answers = read_lines(target)
    assert [line["custom_id"] for line in answers] == ["row-0", "row-1", "row-2"]
    assert {line["response"]["body"]["model"] for line in answers} == {tiny_model.name}


@pytest.mark.slow
def test_a_terminal_sees_bar_rate_and_time_left(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_fake_engine(monkeypatch)
    source = write_lines(tmp_path / "in.jsonl", [*many_lines(64)])
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    running = subprocess.Popen(
        [*NIGHTJAR, *run_arguments(source, tiny_model, tmp_path / "out.jsonl")],
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 65536):
            seen += chunk
    except OSError:  # the terminal closes with its last writer
        pass
    finally:
        os.close(ours)
    assert running.wait() == 0
    for part in (b"computing", "\u2501".encode(), b"64/64", b"requests/s", b"left", b"succeeded"):
        assert part in seen
