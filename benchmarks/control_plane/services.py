"""Processes of a deployment: they are started together, watched, and ended together."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis

import nightjar
from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service

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
            for child in found[parent].children(recursive=True) if parent in found else ():
                if any(module in word for word in child.cmdline()):
                    found[name] = child
        return found

    def broker_bytes(self) -> int:
        """What the broker holds."""
        return int(self.broker.info("memory")["used_memory"])


@contextmanager
def run_services(
    commands: Mapping[str, list[str]],
    environment: Callable[[str], dict[str, str]],
    logs: Path,
    api_url: str = "",
) -> Iterator[Deployment]:
    """A broker, then what the commands start by name; all have ended when the block has.

    environment: given the broker's URL, that of every process.
    """
    logs.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(prefix="nightjar-"))
    variables = {"PYTHONPATH": str(Path(nightjar.__file__).parents[1])}
    variables = environment(broker_url(private)) | variables
    broker = redis.Redis(unix_socket_path=str(private / "broker.sock"))
    started: dict[str, Service] = {}
    try:
        for name, command in {"broker": broker_command(private), **commands}.items():
            log = logs.resolve() / f"{name}.log"
            started[name] = service = Service(name, command, log, variables, private)
            service.start()
            if name == "broker":
                wait_for_broker(private, service)
        yield Deployment(started, api_url, broker)
    finally:
        for service in reversed(started.values()):
            service.stop(_GRACE_S)
        broker.close()
        shutil.rmtree(private, ignore_errors=True)


def wait_until(
    has_come: Callable[[], object],
    patience_s: float = 120.0,
    every_s: float = 0.05,
    late: Callable[[], str] = lambda: "nothing came in time; see the logs",
) -> None:
    """Look again and again; raises SystemExit with `late` where it does not come."""
    deadline = time.monotonic() + patience_s
    while not has_come():
        if time.monotonic() > deadline:
            raise SystemExit(late())
        time.sleep(every_s)
