"""A whole deployment of real processes, each with metrics, logs and traces of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import redis

from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service, private_directory
from tests.processes import NIGHTJAR, wait_until
from tests.services import free_port

COMMANDS = {
    "api": ["api"],
    "planner": ["worker", "plan"],
    "gpu-worker": ["worker", "compute", "--engine=fake"],
    "beat": ["beat"],
    "flower": ["flower"],
    "tasks": ["worker", "tasks"],
}
PARTS = tuple(COMMANDS)[:-1]
"""The parts that tell of themselves over HTTP: all but the task runner."""
HASTE = {
    "NIGHTJAR_HEARTBEAT_S": "0.3",
    "NIGHTJAR_SWEEP_EVERY_S": "0.5",
    "NIGHTJAR_MICRO_BATCH_REQUESTS": "8",
    "NIGHTJAR_REQUEST_CRASHES": "1",
    "NIGHTJAR_WEBHOOK_ALLOW_PRIVATE": "true",
}


@dataclass
class Monitored:
    """Running processes: their variables, their logs, and where they answer."""

    folder: Path
    key: str
    database_url: str
    environment: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    services: dict[str, Service] = field(default_factory=dict)

    @property
    def client(self) -> httpx.Client:
        """A client of the API with the key of an administrator."""
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.ports['api']}",
            headers={"authorization": f"Bearer {self.key}"},
            timeout=60,
        )

    def scrape(self, name: str) -> str:
        """What a process exposes."""
        if name == "api":
            with self.client as client:
                return client.get("/metrics").raise_for_status().text
        answer = httpx.get(f"http://127.0.0.1:{self.ports[name]}/metrics", timeout=10)
        return answer.raise_for_status().text

    def log(self, name: str) -> str:
        """All that a process and its children have written."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")

    def stop(self) -> None:
        """End every process in order, so that all of their logs are written."""
        for name in ("api", "tasks", "gpu-worker", "planner", "beat", "flower", "broker"):
            if name in self.services:
                self.services[name].stop(15)


@contextmanager
def monitored(
    database_url: str,
    model: Path,
    folder: Path,
    key: str,
    parts: Sequence[str] = PARTS,
    broker_password: str | None = None,
    **settings: str,
) -> Iterator[Monitored]:
    """Start processes over an empty database until they work.

    broker_password: the broker listens on a port and asks for it; None: on a private socket.
    """
    directory = private_directory()
    system = Monitored(folder, key, database_url)
    port = free_port()
    place = f"redis://:{broker_password}@127.0.0.1:{port}/0"
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("NIGHTJAR_", "OTEL_"))},
        "NIGHTJAR_DATABASE_URL": database_url,
        "NIGHTJAR_BROKER_URL": broker_url(directory) if broker_password is None else place,
        "NIGHTJAR_MODEL": str(model),
        "NIGHTJAR_VERIFY": "off",  # random weights are never in order
        "NIGHTJAR_API_KEY": key,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        **HASTE,
        **settings,
    }
    system.environment.update(environment)

    def start(name: str, command: list[str], **more: str) -> None:
        log = folder / f"{name}.log"
        system.services[name] = Service(name, command, log, environment | more, directory)
        system.services[name].start()

    try:
        if broker_password is None:
            start("broker", broker_command(directory))
            wait_for_broker(directory, system.services["broker"])
        else:
            guarded = ["--bind", "127.0.0.1", "--port", str(port), "--requirepass", broker_password]
            start("broker", [*broker_command(directory), *guarded])
            wait_until("the broker", lambda: _answers(place), 30)
        subprocess.run([*NIGHTJAR, "migrate"], env=environment, check=True, capture_output=True)
        for name in parts:
            command = COMMANDS[name]
            if name == "tasks":
                start(name, [*NIGHTJAR, *command])
                continue
            port = system.ports[name] = free_port()
            if name in ("api", "flower"):
                start(name, [*NIGHTJAR, *command, f"--port={port}"])
            else:
                start(name, [*NIGHTJAR, *command], NIGHTJAR_METRICS_ADDRESS=str(port))
        wait_until("the deployment", lambda: works(system), 90)
        yield system
    except BaseException:
        for name, service in system.services.items():
            sys.stderr.write(f"--- {name}\n{service.log_tail()}\n")
        raise
    finally:
        system.stop()
        shutil.rmtree(directory, ignore_errors=True)


def _answers(broker: str) -> bool:
    try:
        with redis.Redis.from_url(broker) as client:
            return bool(client.ping())
    except redis.ConnectionError:
        return False


def works(system: Monitored) -> bool:
    """Whether every process answers, and the API sees all parts."""
    try:
        for name in system.ports:
            if name == "flower":
                httpx.get(f"http://127.0.0.1:{system.ports[name]}/healthcheck", timeout=5)
            elif name != "api":
                system.scrape(name)
        with system.client as client:
            return set(client.get("/health").json()["parts"].values()) == {"ok"}
    except httpx.HTTPError:
        return False
