"""The services of docker-compose.yml as processes of this machine.

Each runs the `command:` of its service with the service's own `environment:`. Only what must
differ without containers is put in the place of what stands there: hosts, ports, the database's
URL, the model's directory. PostgreSQL is the tests' own.
"""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import redis
from sqlalchemy.engine import make_url

from nightjar.pipeline.embedded.broker import _server_program
from nightjar.pipeline.embedded.processes import Service
from tests.compose_file import ComposeService, read_compose
from tests.processes import NIGHTJAR, wait_until

VARIABLES = {
    "POSTGRES_PASSWORD": "p0stgres",
    "VALKEY_PASSWORD": "va1key",
    "MESSAGE_KEY": "owls-sign-messages",
    "API_KEY": "owls-open-the-api-with-32-letters",
    "FLOWER_AUTH": "owl:hoot",
}
# Shorter times for tests; the mechanisms are the same.
HASTE = {
    "NIGHTJAR_HEARTBEAT_S": "0.5",
    "NIGHTJAR_SWEEP_EVERY_S": "1",
    "NIGHTJAR_WORKER_DEAD_AFTER_S": "4",
    "NIGHTJAR_REDISPATCH_AFTER_S": "8",
    "NIGHTJAR_MICRO_BATCH_REQUESTS": "32",
    "NIGHTJAR_COMPUTE_THREADS": "1",  # tiny matrices
}
DATABASE = "postgres"
BROKER = "valkey"
OURS = ("migrate", "api", "planner", "gpu-worker", "beat", "tasks", "flower")
_GRACE_S = 15.0


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Deployment:
    """The services by name, none of them started yet.

    Args:
        directory: Where logs go.
        database_url: An empty PostgreSQL database.
        model: The directory that stands where the containers have /models/served.
    """

    def __init__(self, directory: Path, database_url: str, model: Path) -> None:
        self.directory = directory
        self.compose = read_compose(VARIABLES)
        self.api_port, self.flower_port, self.broker_port = free_port(), free_port(), free_port()
        self._database_url, self._model = database_url, model
        self.services = {
            name: self._process(name, self._our_command(name), self.environment(name))
            for name in OURS
        }
        self.services[BROKER] = self._process(BROKER, self._broker_command(), {})
        self._stopped: set[str] = set()

    @property
    def api_url(self) -> str:
        """Where the API answers."""
        return f"http://127.0.0.1:{self.api_port}"

    @property
    def flower_url(self) -> str:
        """Where Flower answers."""
        return f"http://127.0.0.1:{self.flower_port}"

    def environment(self, name: str) -> dict[str, str]:
        """The service's environment with local addresses."""
        given = dict(self.compose[name].environment)
        assert make_url(given["NIGHTJAR_DATABASE_URL"]) == self._declared_database()
        given["NIGHTJAR_DATABASE_URL"] = self._database_url
        broker = f"@{BROKER}:6379/"
        assert broker in given["NIGHTJAR_BROKER_URL"]
        local = f"@127.0.0.1:{self.broker_port}/"
        given["NIGHTJAR_BROKER_URL"] = given["NIGHTJAR_BROKER_URL"].replace(broker, local)
        assert any(v.endswith(f":{given['NIGHTJAR_MODEL']}:ro") for v in self._volumes(name))
        # Random weights are never in order.
        model = {"NIGHTJAR_MODEL": str(self._model), "NIGHTJAR_VERIFY": "off"}
        return given | model | HASTE

    def start_in_order(self) -> None:
        """Start every service as `docker compose up` would: after what it depends on."""
        waiting = [self.compose[name] for name in (BROKER, *OURS)]
        started = {DATABASE}
        while waiting:
            ready = [service for service in waiting if service.depends_on.keys() <= started]
            assert ready, f"depends_on goes in a circle: {waiting}"
            for service in ready:
                self._meet_conditions(service)
                self.services[service.name].start()
                waiting.remove(service)
            started |= {service.name for service in ready}

    def start_broker(self) -> None:
        """Start the broker and wait until it answers."""
        self._stopped.discard(BROKER)
        self.services[BROKER].start()
        self.wait_healthy(BROKER)

    def stop_broker(self) -> None:
        """End the broker; it keeps nothing."""
        self._stopped.add(BROKER)
        self.services[BROKER].stop(_GRACE_S)

    def run_migration(self) -> None:
        """Start the service `migrate` and wait for its success."""
        self.services["migrate"].start()
        self.wait_completed("migrate")

    def wait_completed(self, name: str) -> None:
        """Wait until a service has ended well."""
        process = self.services[name].process
        assert process is not None
        assert process.wait(60) == 0, self.services[name].log_tail()

    def wait_healthy(self, name: str) -> None:
        """Wait until a service passes what stands for its healthcheck here."""
        if name == DATABASE:
            return  # the tests' own server runs already
        assert "healthcheck" in self.compose[name].raw
        assert name == BROKER
        password = VARIABLES["VALKEY_PASSWORD"]

        def answers() -> bool:
            with (
                suppress(redis.ConnectionError),
                redis.Redis(port=self.broker_port, password=password) as client,
            ):
                return bool(client.ping())
            return False

        wait_until("the broker", answers, 20)

    def wait_for_api(self) -> None:
        """Wait until the API says that it is healthy."""
        wait_until("the API", lambda: _status(f"{self.api_url}/health") == 200, 60)

    def stop(self) -> None:
        """End every process, whatever it is doing."""
        children = [child for name in self.services for child in self.children(name)]
        running = [service for service in self.services.values() if service.process is not None]
        for service in running:
            if service.name != BROKER:
                assert service.process is not None
                service.process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for service in running:
            service.stop(max(0.1, deadline - time.monotonic()))
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()

    def restart_ended(self) -> list[str]:
        """Start again what has ended by itself, as `restart: unless-stopped` asks; its names."""
        return [
            name
            for name, service in self.services.items()
            if self.compose[name].raw["restart"] == "unless-stopped"
            and name not in self._stopped
            and service.keep_running()
        ]

    def children(self, name: str) -> list[psutil.Process]:
        """The processes below a service."""
        process = self.services[name].process
        if process is None or process.poll() is not None:
            return []
        return psutil.Process(process.pid).children(recursive=True)

    def logs(self) -> str:
        """The ends of all logs, for a failed test."""
        return "\n".join(
            f"--- {name}\n{service.log_tail()}"
            for name, service in self.services.items()
            if service.process is not None
        )

    def _meet_conditions(self, service: ComposeService) -> None:
        for name, condition in service.depends_on.items():
            if condition == "service_completed_successfully":
                self.wait_completed(name)
            elif condition == "service_healthy":
                self.wait_healthy(name)

    def _process(self, name: str, command: list[str], environment: Mapping[str, str]) -> Service:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("NIGHTJAR_")}
        log = self.directory / f"{name}.log"
        return Service(name, command, log, {**inherited, **environment}, self.directory)

    def _our_command(self, name: str) -> list[str]:
        """The service's command line; `nightjar` is the one under test."""
        program, *arguments = self.compose[name].command
        assert program == "nightjar"
        local = {
            "--host=0.0.0.0": "--host=127.0.0.1",
            "--address=0.0.0.0": "--address=127.0.0.1",
            "--port=8000": f"--port={self.api_port}",
            "--port=5555": f"--port={self.flower_port}",
        }
        return [*NIGHTJAR, *(local.get(argument, argument) for argument in arguments)]

    def _broker_command(self) -> list[str]:
        program, *arguments = self.compose[BROKER].command
        assert program == "valkey-server"
        place = ["--bind", "127.0.0.1", "--port", str(self.broker_port)]
        return [str(_server_program()), *arguments, *place, "--dir", str(self.directory)]

    def _declared_database(self) -> object:
        """The URL of the database that the compose file's own PostgreSQL makes."""
        made = self.compose[DATABASE].environment
        user, password = made["POSTGRES_USER"], made["POSTGRES_PASSWORD"]
        return make_url(f"postgresql://{user}:{password}@{DATABASE}:5432/{made['POSTGRES_DB']}")

    def _volumes(self, name: str) -> list[str]:
        volumes: list[str] = self.compose[name].raw["volumes"]
        return volumes


@contextmanager
def running_deployment(directory: Path, database_url: str, model: Path) -> Iterator[Deployment]:
    """A deployment whose processes end with the block."""
    deployment = Deployment(directory, database_url, model)
    try:
        yield deployment
    finally:
        deployment.stop()


def _status(url: str) -> int | None:
    """Return the HTTP status of a URL; None where no server listens."""
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.TransportError:
        return None


def end_abruptly(service: Service) -> None:
    """SIGKILL, as the kernel does to a process that took too much memory."""
    process: subprocess.Popen[bytes] | None = service.process
    assert process is not None
    process.kill()
    process.wait()
