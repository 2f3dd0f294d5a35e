"""The API beside a system under test, as one more of its processes."""

import httpx

from nightjar.pipeline.embedded.processes import Service
from tests.faults.system import System
from tests.processes import NIGHTJAR

API = "api"


def give_api(port: int, system: System) -> None:
    """Let the system have an API on this port; before it starts."""
    command = [*NIGHTJAR, API, f"--port={port}"]
    log = system.folder / "api.log"
    system.services[API] = Service(API, command, log, system.environment, system.private)


def answers_http(url: str) -> bool:
    """Whether the API says that it can do its work."""
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
