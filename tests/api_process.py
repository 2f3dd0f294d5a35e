"""`nightjar api` as a process of its own, without a broker."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

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
            found[:] = find_children(self.process.pid, "nightjar.pipeline.api_server")
            return bool(found and found[0].net_connections("unix"))

        wait_until("the process that takes uploads", listens)
        return found[0]


@contextmanager
def running_api(database_url: str, model: Path, folder: Path, **settings: str) -> Iterator[Api]:
    """The API over tables that exist; it has ended when the block has."""
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
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until("the API", lambda: _answers(url))
        assert service.process is not None
        yield Api(url, service.process)
    finally:
        service.stop(10)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
