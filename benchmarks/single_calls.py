"""Latency of single calls, status polls and first results, with a fake engine.

All processes of a deployment run, and the engine takes no time, so that what is measured is
Nightjar's own part.
"""

import gc
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import httpx
import urllib3

from benchmarks.control_plane.requests import body, write_jobs
from benchmarks.control_plane.services import Deployment, deployment, wait_until
from benchmarks.control_plane.watch import latencies
from benchmarks.harness import DATABASES, Benchmark, Figures
from nightjar.pipeline.client.blocking import Client, Job

CALLS_A_SECOND = 20.0
POLLS_A_SECOND = 200.0
FIRST_ROWS = 7  # jobs whose first row is waited for
FIRST_ROW_JOB = 1_000  # rows of each
_EVERY_S = 0.002
WARM_UP = 20
_THREADS = 64
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests sent at fixed moments, whatever the answers take."""

    method: str
    url: str
    body: dict[str, object] | None
    a_second: float
    count: int


def send(load: Load) -> list[float]:
    """Send the load from a process of its own; return the latencies, from the planned moments.

    The process costs little itself.  httpx took 3 to 4 ms of CPU a request, and a full garbage
    collection stopped the process for 0.1 s.  At 200 requests a second that was most of what was
    measured.  urllib3 on kept connections costs a tenth of that, and nothing is collected while
    the load lasts.

    Raises:
        RuntimeError: An answer is no success.
    """
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_send, (load,))


def _send(load: Load) -> list[float]:
    connections = urllib3.PoolManager(maxsize=_THREADS, timeout=_PATIENCE_S, retries=False)
    gc.collect()
    gc.freeze()
    gc.disable()

    def exchange(due: float) -> float:
        answer = connections.request(load.method, load.url, json=load.body)
        if answer.status // 100 != 2:
            raise RuntimeError(f"{answer.status}: {answer.data.decode()}")
        return time.monotonic() - due

    for _ in range(WARM_UP):
        exchange(time.monotonic())
    began = time.monotonic() + 0.1
    with ThreadPoolExecutor(_THREADS) as threads:
        sent = []
        for number in range(load.count):
            due = began + number / load.a_second
            time.sleep(max(0.0, due - time.monotonic()))
            sent.append(threads.submit(exchange, due))
        return [one.result() for one in sent]


def first_rows(running: Deployment, folder: Path, model: Path) -> Figures:
    """From the submission of a job to its first readable result, several times."""
    (path,) = write_jobs(folder, model, FIRST_ROW_JOB, FIRST_ROW_JOB)
    seconds = []
    with Client(running.api_url) as client, httpx.Client(base_url=running.api_url) as http:

        def first(job: Job) -> object:
            answer = http.get(f"/v1/jobs/{job.id}/results?limit=1&order=landed")
            return answer.raise_for_status().json()["data"]

        for _ in range(FIRST_ROWS):
            began = time.monotonic()
            job = client.submit(path)
            wait_until(partial(first, job), every_s=_EVERY_S)
            seconds.append(time.monotonic() - began)
            job.wait(_PATIENCE_S)
    return latencies(seconds) | {"rows": FIRST_ROW_JOB}


def measure(args: Namespace, folder: Path) -> Figures:
    """All figures with one database."""
    with deployment(args.way, folder, args.model) as running, Client(running.api_url) as client:
        first = first_rows(running, folder, args.model)
        (job, *_) = client.jobs()
        polls = int(args.calls * POLLS_A_SECOND / CALLS_A_SECOND) // 2
        v1, asked = f"{running.api_url}/v1", body("오늘 저녁")
        loads = {
            "calls": Load("POST", f"{v1}/completions", asked, CALLS_A_SECOND, args.calls),
            "polls": Load("GET", f"{v1}/jobs/{job.id}", None, POLLS_A_SECOND, polls),
        }
        figures = {name: latencies(send(load)) for name, load in loads.items()}
        beside = {
            f"{name}_beside_bulk": _beside_bulk(client, load, folder, args)
            for name, load in loads.items()
        }
    return figures | {"first_row": first} | beside


def _beside_bulk(client: Client, load: Load, folder: Path, args: Namespace) -> Figures:
    """The load while a bulk job is planned and computed; says how much of the job that was."""
    (path,) = write_jobs(folder, args.model, args.bulk_rows, args.bulk_rows)
    job = client.submit(path)
    figures = latencies(send(load))
    ended = job.cancel().counts.completed
    job.wait(_PATIENCE_S)
    return figures | {"bulk": {"rows": args.bulk_rows, "ended_meanwhile": ended}}


OPTIONS = {
    "--calls": (400, "alone, and as many beside a bulk job"),
    "--bulk-rows": (100_000, "of the bulk job"),
}
ABOUT = {"calls_a_second": CALLS_A_SECOND, "polls_a_second": POLLS_A_SECOND}
BENCHMARK = Benchmark("single_calls", __doc__, measure, DATABASES, options=OPTIONS, about=ABOUT)

if __name__ == "__main__":
    BENCHMARK.main()
