"""Nightjar as it is deployed: broker, planner, beat, GPU worker with the fake engine, API."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis

import nightjar
from benchmarks.control_plane.watch import Watch, percentile
from nightjar.jobs.store import Store
from nightjar.pipeline.client.blocking import Client
from nightjar.pipeline.client.errors import ClientError
from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service
from nightjar.pipeline.queue.commands import WorkerRole, beat_command, worker_command
from nightjar.pipeline.settings import Settings

POLL_EVERY_S = 0.1
_START_S = 60.0
_GRACE_S = 20.0
# What services start: by name, whose child it is and its module.
_CHILDREN = {"compute": ("gpu-worker", "gpu_worker.compute"), "uploads": ("api", "api_server")}


@dataclass(frozen=True, slots=True)
class Deployment:
    """The services that run, and where they answer."""

    services: dict[str, Service]
    api_url: str
    broker: redis.Redis

    def processes(self) -> dict[str, psutil.Process]:
        """The processes by name, what they started and the client among them."""
        found = {"client": psutil.Process()}
        for name, service in self.services.items():
            assert service.process is not None
            found[name] = psutil.Process(service.process.pid)
        for name, (parent, module) in _CHILDREN.items():
            for child in found[parent].children(recursive=True):
                if any(module in word for word in child.cmdline()):
                    found[name] = child
        return found

    def broker_bytes(self) -> int:
        """What the broker holds."""
        return int(self.broker.info("memory")["used_memory"])


@contextmanager
def deployment(database_url: str, model: Path, logs: Path) -> Iterator[Deployment]:
    """All services of one machine; they have ended when the block has."""
    store = Store(database_url)
    store.migrate()
    store.close()
    logs.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    private = Path(tempfile.mkdtemp(prefix="nightjar-"))
    settings = Settings.read(model=model.resolve(), engine="fake")
    environment = {k: v for k, v in os.environ.items() if k != "NIGHTJAR_DATABASE_URL"} | {
        "NIGHTJAR_DATABASE_URL": database_url,
        "NIGHTJAR_BROKER_URL": broker_url(private),
        "NIGHTJAR_MODEL": str(model.resolve()),
        "NIGHTJAR_ENGINE": "fake",
        "PYTHONPATH": str(Path(nightjar.__file__).parents[1]),
    }
    commands = {
        "broker": broker_command(private),
        "gpu-worker": worker_command(WorkerRole.COMPUTE, settings),
        "planner": worker_command(WorkerRole.PLAN, settings),
        "beat": beat_command(),
        "api": [sys.executable, "-m", "nightjar", "api", f"--port={port}"],
    }
    services = {
        name: Service(name, command, logs.resolve() / f"{name}.log", environment, private)
        for name, command in commands.items()
    }
    running = Deployment(
        services,
        f"http://127.0.0.1:{port}",
        redis.Redis(unix_socket_path=str(private / "broker.sock")),
    )
    try:
        services["broker"].start()
        wait_for_broker(private, services["broker"])
        for name, service in services.items():
            if name != "broker":
                service.start()
        _wait_ready(running)
        yield running
    finally:
        for name in ("api", "beat", "planner", "gpu-worker", "broker"):
            services[name].stop(_GRACE_S)
        running.broker.close()
        shutil.rmtree(private, ignore_errors=True)


def _wait_ready(running: Deployment) -> None:
    """Until the API answers and a first request has gone all the way."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            httpx.get(f"{running.api_url}/health").raise_for_status()
            break
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise SystemExit(running.services["api"].log_tail()) from None
            time.sleep(0.1)
    line = f'{{"custom_id":"{secrets.token_hex(4)}","method":"POST","url":"/v1/completions",'
    line += '"body":{"prompt":"a"}}'
    answer = (
        httpx.post(f"{running.api_url}/v1/jobs", content=line, timeout=_START_S)
        .raise_for_status()
        .json()
    )
    with Client(running.api_url) as client:
        while not client.job(answer["id"]).status().is_over:
            if time.monotonic() > deadline:
                raise SystemExit(running.services["gpu-worker"].log_tail())
            time.sleep(0.1)


class _Poller:
    """Asks for the state of every job that is not over, again and again."""

    def __init__(self, api_url: str) -> None:
        self._api_url = api_url
        self._open: list[str] = []
        self._all_there = threading.Event()
        self.latencies_s: list[float] = []
        self.ended_at = 0.0
        self.failed = 0
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def add(self, job_id: str) -> None:
        self._open.append(job_id)

    def wait(self) -> None:
        """No job comes any more: return when all are over."""
        self._all_there.set()
        self._thread.join()

    def _poll(self) -> None:
        turn = 0
        with Client(self._api_url) as client:
            while self._open or not self._all_there.is_set():
                time.sleep(POLL_EVERY_S)
                if self._open:
                    turn += 1
                    self._ask(client, self._open[turn % len(self._open)])

    def _ask(self, client: Client, job_id: str) -> None:
        asked = time.monotonic()
        status = client.job(job_id).status()
        self.ended_at = time.monotonic()
        self.latencies_s.append(self.ended_at - asked)
        if status.is_over:
            self._open.remove(job_id)
            self.failed += status.counts.failed


@contextmanager
def _submitter(api_url: str, files: list[Path]) -> Iterator[Callable[[], Iterator[str]]]:
    """A process that sends the files when the function is called, which gives the jobs' ids.

    Not a thread of this one: polls would wait for it, in Python, and not for the API.
    """
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_send_files, args=(there, api_url, files)
    )
    process.start()
    here.recv()  # it is ready

    def submit() -> Iterator[str]:
        here.send(None)
        for _ in files:
            yield here.recv()

    try:
        yield submit
    finally:
        process.join(_GRACE_S)
        process.terminate()


def _send_files(pipe: Connection, api_url: str, files: list[Path]) -> None:
    with Client(api_url) as client:
        pipe.send(None)
        pipe.recv()
        for path in files:
            pipe.send(client.submit(path).id)


def measure(
    running: Deployment, servers: dict[str, psutil.Process], files: list[Path], requests: int
) -> dict[str, Any]:
    """Send the files, a job each, and follow the jobs to their ends."""
    broker_before = running.broker_bytes()
    with _submitter(running.api_url, files) as submit:
        watched = running.processes() | servers
        with Watch(watched, running.broker_bytes) as watch:
            started = time.monotonic()
            poller = _Poller(running.api_url)
            for job_id in submit():
                poller.add(job_id)
            submitted = time.monotonic()
            poller.wait()
            ended = poller.ended_at
    if poller.failed:
        raise ClientError(f"{poller.failed} requests failed")
    return {
        "requests": requests,
        "jobs": len(files),
        "seconds": round(ended - started, 2),
        "submit_seconds": round(submitted - started, 2),
        "requests_per_s": round(requests / (ended - started), 1),
        "cpu_us_per_request": {
            name: round(spent / requests * 1e6, 1) for name, spent in watch.cpu_s.items()
        },
        "memory": watch.memory(),
        "broker_mib": {
            "before": round(broker_before / 2**20, 2),
            "peak": round(max((s.broker_mib for s in watch.samples), default=0.0), 2),
        },
        "status_poll": {
            "polls": len(poller.latencies_s),
            "p50_ms": round(percentile(poller.latencies_s, 0.5) * 1e3, 1),
            "p99_ms": round(percentile(poller.latencies_s, 0.99) * 1e3, 1),
        },
    }
