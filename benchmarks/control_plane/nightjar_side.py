"""Jobs through a deployment of Nightjar: from their submission over HTTP to their last result."""

import time
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any

from benchmarks.control_plane.services import Deployment
from benchmarks.control_plane.watch import latencies, travelled
from nightjar.pipeline.client.blocking import Client
from nightjar.pipeline.client.errors import ClientError

POLL_EVERY_S = 0.1

Sent = AsyncResult[tuple[str, float]]
"""The id of a job, and when it was known."""


def measure(running: Deployment, files: list[Path], requests: int) -> dict[str, Any]:
    """Send the files, a job each, and follow the jobs to their ends."""
    # Not a thread of this one: polls would wait for it, in Python, and not for the API.
    with get_context("spawn").Pool(1) as pool:
        pool.apply(is_ready)
        with running.watch() as watch:
            started = time.monotonic()
            sent = [pool.apply_async(_send, (running.api_url, path)) for path in files]
            submitted, ended, seconds = _follow(running.api_url, sent)
    return travelled(requests, started, submitted, ended, watch) | {
        "jobs": len(files),
        "status_poll": latencies(seconds),
    }


def is_ready() -> bool:
    """In the sending process: it has imported what it needs."""
    return True


def _send(api_url: str, path: Path) -> tuple[str, float]:
    """In the sending process: submit a file."""
    with Client(api_url) as client:
        return client.submit(path).id, time.monotonic()


def _follow(api_url: str, sent: list[Sent]) -> tuple[float, float, list[float]]:
    """Ask for the state of every job that is not over, in turn, until none is left.

    Returns when the last was submitted and when it ended, and the seconds of each answer.
    """
    open_jobs: list[str] = []
    submitted = ended = 0.0
    failed, seconds = 0, list[float]()
    with Client(api_url) as client:
        while sent or open_jobs:
            time.sleep(POLL_EVERY_S)
            while sent and sent[0].ready():
                job_id, submitted = sent.pop(0).get()
                open_jobs.append(job_id)
            if open_jobs:
                asked = time.monotonic()
                job = client.job(open_jobs[len(seconds) % len(open_jobs)]).status()
                ended = time.monotonic()
                seconds.append(ended - asked)
                if job.is_over:
                    open_jobs.remove(job.id)
                    failed += job.counts.failed
    if failed:
        raise ClientError(f"{failed} requests failed")
    return submitted, ended, seconds
