"""The benchmark of the control plane: its requests, its figures, and all of it on a small scale."""

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import mean
from threading import Thread
from typing import Any, ClassVar

import psutil
import pytest

from benchmarks import single_calls
from benchmarks.control_plane.__main__ import BENCHMARK
from benchmarks.control_plane.requests import MAX_TOKENS, PROMPT_TOKENS, prompts, write_jobs
from benchmarks.control_plane.watch import Watch, families_of, growth, latencies, resident_bytes
from benchmarks.harness import DATABASES, Benchmark
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
        BENCHMARK.arguments(["--databases", "sqlite,postgres"])
    assert "postgres: not among sqlite, postgresql" in capsys.readouterr().err
    assert BENCHMARK.arguments(["--databases", "sqlite"]).ways == ["sqlite"]


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
            families = families_of(processes)
            with Watch(lambda: families, {"broker's data": lambda: 3 << 20}) as watch:
                wait_until("a sample", lambda: watch.samples, 20)
        finally:
            named.kill()
            unnamed.kill()
    assert [process.pid for process in families["sleeper"]] == [named.pid]
    assert unnamed.pid in {process.pid for process in families["client"]}
    assert named.pid not in {process.pid for process in families["client"]}
    assert watch.samples[0]["broker's data"] == 3.0
    assert watch.memory()["sleeper"]["peak_mib"] < watch.memory()["client"]["peak_mib"]
    assert watch.cpu_s.keys() == {"client", "sleeper"}


@pytest.mark.slow
def test_the_whole_benchmark_on_a_small_scale(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    arguments = ["--requests=600", "--job-requests=200", "--celery-requests=100"]
    arguments += ["--bulk-rows=300", "--long-rows=2"]
    arguments += [f"--work={tmp_path / 'work'}", f"--out={out}", "--databases=sqlite"]
    BENCHMARK.main(arguments)
    figures = json.loads(out.read_text(encoding="utf-8"))["sqlite"]
    assert figures["nightjar"]["requests"] == 600
    assert figures["nightjar"]["jobs"] == 3
    assert figures["nightjar"]["requests_per_s"] > 0
    assert figures["plain_celery"]["requests"] == 100
    assert figures["nightjar"]["status_poll"]["count"] > 0
    beside = figures["beside_bulk"]
    assert beside["urgent_job_s"] > 0
    assert 0 < beside["dead_workers_lease_back_s"] <= beside["dead_workers_work_done_again_s"]
    assert figures["long_rows"]["refused"] == 2
    assert figures["long_rows"]["planner_peak_mib"] > 10


def test_latencies_are_values_that_were_measured() -> None:
    seconds = [n / 1_000 for n in range(1, 201)]
    assert latencies(seconds) == {"count": 200, "p50_ms": 101.0, "p99_ms": 199.0, "max_ms": 200.0}


class Answers(BaseHTTPRequestHandler):
    """Answers each request after a while; `seen` holds each body and its connection."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[tuple[bytes, object]]] = []

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.seen.append((self.rfile.read(length), self.client_address))
        time.sleep(0.02)
        self.send_response(500 if self.path == "/broken" else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Answers.seen.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as running:
        Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_a_load_is_sent_at_its_moments_over_kept_connections(server: str) -> None:
    load = single_calls.Load("POST", f"{server}/", {"prompt": "a"}, 50.0, 50)
    began = time.monotonic()
    found = single_calls.send(load)
    assert time.monotonic() - began > 49 / 50
    assert len(found) == 50
    assert min(found) >= 0.02
    bodies, connections = zip(*Answers.seen, strict=True)
    assert set(bodies) == {b'{"prompt":"a"}'}
    assert len(bodies) == 50 + single_calls.WARM_UP
    assert len(set(connections)) < 40


def test_a_load_that_is_refused_is_no_figure(server: str) -> None:
    with pytest.raises(RuntimeError, match="500"):
        single_calls.send(single_calls.Load("POST", f"{server}/broken", {}, 50.0, 2))


def test_ways_that_are_measured_in_several_calls_stay_together(tmp_path: Path) -> None:
    benchmark = Benchmark(
        "made_up",
        "Made up.",
        lambda args, folder: {"folder": folder.name, "rows": args.rows},
        DATABASES,
        options={"--rows": (7, "of it")},
        about={"asked": 1},
    )
    given = ["--out", str(tmp_path / "out.json"), "--work", str(tmp_path / "work")]
    benchmark.main([*given, "--databases", "sqlite"])
    benchmark.main([*given, "--databases", "postgresql", "--rows", "9"])
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (found["asked"], found["sqlite"]["rows"], found["postgresql"]["rows"]) == (1, 7, 9)
    assert "--rows 9" in found["postgresql"]["command"]
    assert found["sqlite"]["folder"] == "made_up-sqlite"
