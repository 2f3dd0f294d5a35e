"""Jobs through a deployment of Nightjar: from their submission over HTTP to their last result."""

import gc
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

import httpx
import urllib3

from benchmarks.control_plane.requests import write_jobs
from benchmarks.control_plane.services import Deployment, deployment
from benchmarks.control_plane.watch import latencies, travelled
from benchmarks.harness import Figures, by_turns
from nightjar.pipeline.client.blocking import Client
from tests.services import free_port

POLL_EVERY_S = 0.02  # so that a run has some hundred polls, and a percentile is not the longest
_READ_EVERY_S = 5.0

Sent = AsyncResult[tuple[str, float]]
"""The id of a job, and when it was known."""


def measure(running: Deployment, files: list[Path], requests: int) -> Figures:
    """Send the files, a job each, and follow the jobs to their ends."""
    # Not threads of this one: they would wait for each other and for the watch, not for the API.
    spawned = get_context("spawn")
    with spawned.Pool(1) as sender, spawned.Pool(1) as poller:
        for pool in (sender, poller):
            pool.apply(callable, (_send,))  # it has imported what it needs
        with running.watch() as watch:
            started = time.monotonic()
            sent = [sender.apply_async(_send, (running.api_url, path)) for path in files]
            polled = []
            for one in sent:
                job_id, submitted = one.get()
                polled.append(poller.apply_async(_follow, (running.api_url, job_id)))
            followed = [one.get() for one in polled]
    ended = max(at for at, _ in followed)
    seconds = [one for _, found in followed for one in found]
    return travelled(requests, started, submitted, ended, watch) | {
        "jobs": len(files),
        "status_poll": latencies(seconds),
    }


def _send(api_url: str, path: Path) -> tuple[str, float]:
    """In the sending process: submit a file."""
    with Client(api_url) as client:
        return client.submit(path).id, time.monotonic()


def _follow(api_url: str, job_id: str) -> tuple[float, list[float]]:
    """In the polling process: ask for the state of a job until it is over.

    Returns when it ended, and the seconds of each answer. By urllib3 and without a garbage
    collection, as a client's own work would be most of what is measured.
    """
    connections, url = urllib3.PoolManager(retries=False), f"{api_url}/v1/jobs/{job_id}"
    gc.collect()
    gc.disable()
    seconds: list[float] = []
    while True:
        asked = time.monotonic()
        answer = connections.request("GET", url)
        ended = time.monotonic()
        seconds.append(ended - asked)
        if answer.json()["finished_at"] is not None:
            return ended, seconds
        time.sleep(POLL_EVERY_S)


def measure_metrics(args: Namespace, folder: Path) -> Figures:
    """What metrics cost: the same requests with metrics and without, by turns.

    All processes count; one of them has the address, and is read as Prometheus does. Processor time
    is compared, as it varies less than the time of a run.
    """
    folder.mkdir()

    def turn(with_metrics: bool) -> Figures:
        work, port = Path(mkdtemp(dir=folder)), free_port()
        settings = {"metrics_address": str(port)} if with_metrics else {}
        with deployment(args.way, work, args.model, **settings) as running:
            files = write_jobs(work, args.model, args.requests, args.job_requests)
            with _scraped(port) if with_metrics else nullcontext():
                return measure(running, files, args.requests)

    ways = {"with": partial(turn, True), "without": partial(turn, False)}
    turns = by_turns(ways, args.metrics_rounds, swapped=True)
    cpu_us = {
        name: [round(sum(one["cpu_us_per_request"].values()), 1) for one in found]
        for name, found in turns.items()
    }
    more = [100 * (w / wo - 1) for w, wo in zip(cpu_us["with"], cpu_us["without"], strict=True)]
    return {
        "cpu_us_per_request": cpu_us,
        "requests_per_s": {n: [one["requests_per_s"] for one in f] for n, f in turns.items()},
        "more_cpu_percent": round(median(more), 1),
    }


@contextmanager
def _scraped(port: int) -> Iterator[None]:
    """Read the metrics every few seconds while the block runs. Raises httpx.HTTPError."""
    url = f"http://127.0.0.1:{port}/metrics"
    httpx.get(url).raise_for_status()
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(_READ_EVERY_S):
            httpx.get(url)

    reader = threading.Thread(target=scrape)
    reader.start()
    try:
        yield
    finally:
        ended.set()
        reader.join()
