"""Nightjar as it is deployed: broker, planner, beat, GPU worker with the fake engine, API."""

import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.control_plane.requests import batch_line
from benchmarks.control_plane.services import Deployment, run_services, wait_until
from benchmarks.control_plane.watch import Watch, percentile, travelled
from nightjar.jobs.store import Store
from nightjar.pipeline.client.blocking import Client
from nightjar.pipeline.client.errors import ClientError
from nightjar.pipeline.queue.commands import WorkerRole, beat_command, worker_command
from nightjar.pipeline.settings import Settings

POLL_EVERY_S = 0.1
_START_S = 60.0


@contextmanager
def deployment(
    database_url: str, model: Path, logs: Path, **settings: object
) -> Iterator[Deployment]:
    """All services of one machine; they have ended when the block has.

    settings: by the names of their variables without NIGHTJAR_, in small letters.
    """
    store = Store(database_url)
    store.migrate()
    store.close()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    known = Settings.read(model=model.resolve(), engine="fake")
    commands = {
        "gpu-worker": worker_command(WorkerRole.COMPUTE, known),
        "planner": worker_command(WorkerRole.PLAN, known),
        "beat": beat_command(),
        "api": [sys.executable, "-m", "nightjar", "api", f"--port={port}"],
    }

    def environment(broker_url: str) -> dict[str, str]:
        own = {"database_url": database_url, "broker_url": broker_url}
        own |= {"model": str(model.resolve()), "engine": "fake"}
        given = own | settings
        return os.environ | {f"NIGHTJAR_{name.upper()}": str(v) for name, v in given.items()}

    with run_services(commands, environment, logs, f"http://127.0.0.1:{port}") as running:
        _wait_ready(running)
        yield running


def _wait_ready(running: Deployment) -> None:
    """Until the API answers and a first request has gone all the way."""

    def is_up() -> bool:
        try:
            return httpx.get(f"{running.api_url}/health").is_success
        except httpx.HTTPError:
            return False

    wait_until(is_up, _START_S, late=running.services["api"].log_tail)
    line = batch_line(secrets.token_hex(4), "/v1/completions", {"prompt": "a"})
    answer = httpx.post(f"{running.api_url}/v1/jobs", content=line, timeout=_START_S)
    job_id = answer.raise_for_status().json()["id"]
    with Client(running.api_url) as client:
        late = running.services["gpu-worker"].log_tail
        wait_until(lambda: client.job(job_id).status().is_over, _START_S, late=late)


def _send(api_url: str, path: Path) -> tuple[str, float]:
    """In a process of its own: submit a file; the job's id, and when it was known."""
    with Client(api_url) as client:
        return client.submit(path).id, time.monotonic()


def _follow(
    api_url: str, sent: list[AsyncResult[tuple[str, float]]]
) -> tuple[float, float, list[float]]:
    """Ask for the state of every job that is not over, in turn, until none is left.

    Returns when the last was submitted and when it ended, and the seconds of each answer.
    """
    open_jobs: list[str] = []
    submitted = ended = 0.0
    failed, latencies_s = 0, list[float]()
    with Client(api_url) as client:
        while sent or open_jobs:
            time.sleep(POLL_EVERY_S)
            while sent and sent[0].ready():
                job_id, submitted = sent.pop(0).get()
                open_jobs.append(job_id)
            if open_jobs:
                asked = time.monotonic()
                job = client.job(open_jobs[len(latencies_s) % len(open_jobs)]).status()
                ended = time.monotonic()
                latencies_s.append(ended - asked)
                if job.is_over:
                    open_jobs.remove(job.id)
                    failed += job.counts.failed
    if failed:
        raise ClientError(f"{failed} requests failed")
    return submitted, ended, latencies_s


def measure(
    running: Deployment, servers: dict[str, psutil.Process], files: list[Path], requests: int
) -> dict[str, Any]:
    """Send the files, a job each, and follow the jobs to their ends."""
    broker_before = running.broker_bytes()
    # Not a thread of this one: polls would wait for it, in Python, and not for the API.
    with get_context("spawn").Pool(1) as pool:
        pool.apply(is_ready)
        with Watch(running.processes() | servers, running.broker_bytes) as watch:
            started = time.monotonic()
            sent = [pool.apply_async(_send, (running.api_url, path)) for path in files]
            submitted, ended, latencies_s = _follow(running.api_url, sent)
    return travelled(requests, started, submitted, ended, watch) | {
        "jobs": len(files),
        "broker_mib": {
            "before": round(broker_before / 2**20, 2),
            "peak": round(max((s.broker_mib for s in watch.samples), default=0.0), 2),
        },
        "status_poll": {
            "polls": len(latencies_s),
            "p50_ms": round(percentile(latencies_s, 0.5) * 1e3, 1),
            "p99_ms": round(percentile(latencies_s, 0.99) * 1e3, 1),
        },
    }


def is_ready() -> bool:
    """In the sending process: it has imported what it needs."""
    return True
