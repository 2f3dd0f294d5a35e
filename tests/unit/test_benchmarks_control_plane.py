"""The benchmark of the control plane: its requests, its figures, and all of it on a small scale."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import pytest

from benchmarks.control_plane import __main__ as command
from benchmarks.control_plane.requests import MAX_TOKENS, PROMPT_TOKENS, prompts, write_jobs
from benchmarks.control_plane.watch import Watch, growth, resident_bytes
from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.lines.batch_lines import BatchReader
from nightjar.jobs.records import NewRequest
from tests.processes import wait_until

MODEL = Path("examples/demo_model")


def test_prompts_have_the_tokens_that_the_figures_say() -> None:
    tokenizer = ModelDirectory.open(MODEL).tokenizer()
    texts = list(prompts(MODEL, 300))
    lengths = [len(ids) for ids in tokenizer.encode_batch(texts)]
    assert len(set(texts)) == 300
    assert mean(lengths) == pytest.approx(PROMPT_TOKENS, abs=4)
    assert min(lengths) > PROMPT_TOKENS - 10
    assert texts == list(prompts(MODEL, 300))


def test_an_unknown_database_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.arguments(["--databases", "sqlite,postgres"])
    assert "postgres: not among sqlite, postgresql" in capsys.readouterr().err
    assert command.arguments(["--databases", "sqlite"]).databases == ["sqlite"]


def test_jobs_hold_every_request_once(tmp_path: Path) -> None:
    files = write_jobs(tmp_path, MODEL, 25, 10)
    rows: list[Any] = []
    sizes = []
    for path in files:
        reader = BatchReader()
        found = [*reader.rows(path.read_bytes()), *reader.last_rows()]
        sizes.append(len(found))
        rows += found
    assert sizes == [10, 10, 5]
    assert all(isinstance(row, NewRequest) for row in rows)
    assert {row.custom_id for row in rows} == {f"row-{index}" for index in range(25)}
    assert {row.body["max_tokens"] for row in rows} == {MAX_TOKENS}


def test_growth_compares_late_with_early() -> None:
    flat = growth([90.0, 100.0, 100.0, 101.0, 100.0, 99.0, 100.0, 101.0])
    assert flat == {"peak_mib": 101.0, "last_over_second_quarter": 1.0}
    growing = growth([float(10 * n) for n in range(1, 9)])
    assert growing["last_over_second_quarter"] == 2.0
    assert growth([5.0]) == {"peak_mib": 5.0}


def test_a_process_that_has_ended_takes_no_memory() -> None:
    with psutil.Popen(["sleep", "30"]) as process:
        assert 0 < resident_bytes(process) <= resident_bytes(process, shared=False)
        process.kill()
    assert resident_bytes(process) == resident_bytes(process, shared=False) == 0


def test_a_watch_tells_processes_apart() -> None:
    """A child without a name counts to its parent, one with a name to itself."""
    with (
        psutil.Popen(["sleep", "30"]) as named,
        psutil.Popen(["sleep", "30"]) as unnamed,
    ):
        try:
            ours = psutil.Process()
            processes = {"client": ours, "sleeper": psutil.Process(named.pid)}
            with Watch(processes, lambda: 3 << 20) as watch:
                families = watch.families()
                wait_until("a sample", lambda: watch.samples, 20)
        finally:
            named.kill()
            unnamed.kill()
    assert [process.pid for process in families["sleeper"]] == [named.pid]
    assert unnamed.pid in {process.pid for process in families["client"]}
    assert named.pid not in {process.pid for process in families["client"]}
    assert watch.samples[0].broker_mib == 3.0
    assert watch.memory()["sleeper"]["peak_mib"] < watch.memory()["client"]["peak_mib"]
    assert watch.cpu_s.keys() == {"client", "sleeper"}


@pytest.mark.slow
def test_the_whole_benchmark_on_a_small_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "figures.json"
    arguments = ["--requests=600", "--job-requests=200", "--celery-requests=100"]
    arguments += ["--bulk-rows=300", "--long-rows=2"]
    arguments += [f"--work={tmp_path / 'work'}", f"--out={out}", "--databases=sqlite"]
    monkeypatch.setattr("sys.argv", ["control_plane", *arguments])
    command.main()
    figures = json.loads(out.read_text(encoding="utf-8"))["sqlite"]
    assert figures["nightjar"]["requests"] == 600
    assert figures["nightjar"]["jobs"] == 3
    assert figures["nightjar"]["requests_per_s"] > 0
    assert figures["plain_celery"]["requests"] == 100
    assert figures["nightjar"]["status_poll"]["polls"] > 0
    beside = figures["beside_bulk"]
    assert beside["urgent_job_s"] > 0
    assert 0 < beside["dead_workers_lease_back_s"] <= beside["dead_workers_work_done_again_s"]
    assert figures["long_rows"]["refused"] == 2
    assert figures["long_rows"]["planner_peak_mib"] > 10
