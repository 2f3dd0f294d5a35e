"""`nightjar api` as a process of its own, without a broker; its application in a thread."""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import uvicorn
from fastapi import FastAPI

from nightjar.pipeline.embedded.processes import Service
from tests.processes import NIGHTJAR, find_children, wait_until
from tests.services import free_port


@dataclass(frozen=True, slots=True)
class Api:
    """A running API: where it answers, and its process."""

    url: str
    process: subprocess.Popen[bytes]

    def upload_process(self) -> psutil.Process:
        """The process below it that takes uploads, once it listens."""
        found: list[psutil.Process] = []

        def listens() -> bool:
            found[:] = find_children(self.process.pid, "nightjar.pipeline.front.api_server")
            return bool(found and upload_sockets(found[0]))

        wait_until("the process that takes uploads", listens)
        return found[0]


def upload_sockets(process: psutil.Process) -> int:
    """How many sockets the process that takes uploads has: one listens, the others are uploads."""
    connections = process.net_connections("unix")
    return sum(str(found.laddr).endswith("uploads.sock") for found in connections)


@contextmanager
def running_api(database_url: str, model: Path, folder: Path, **settings: str) -> Iterator[Api]:
    """The API over tables that exist, once it answers; it has ended when the block has."""
    with starting_api(database_url, model, folder, **settings) as api:
        wait_until("the API", lambda: _answers(api.url))
        yield api


@contextmanager
def starting_api(database_url: str, model: Path, folder: Path, **settings: str) -> Iterator[Api]:
    """The same, as soon as its process exists."""
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NIGHTJAR_")} | {
        "NIGHTJAR_DATABASE_URL": database_url,
        "NIGHTJAR_BROKER_URL": "redis://127.0.0.1:1/0",  # nobody there: a warning, no more
        "NIGHTJAR_MODEL": str(model),
        "PYTHONPATH": str(Path(__file__).parents[1]),
        **settings,
    }
    command = [*NIGHTJAR, "api", f"--port={port}"]
    service = Service("api", command, folder / "api.log", environment, folder)
    service.start()
    try:
        assert service.process is not None
        yield Api(f"http://127.0.0.1:{port}", service.process)
    finally:
        service.stop(10)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serve the application on a port; gives its URL."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until("the server", lambda: server.started)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
