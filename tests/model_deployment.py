"""A deployment whose planners and GPU workers serve one model or several, each a real process."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from nightjar.checkpoints import ModelDirectory
from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service
from nightjar.pipeline.queue.commands import WorkerRole, beat_command, worker_command
from nightjar.pipeline.queue.queues import compute_queues
from nightjar.pipeline.settings import Settings
from tests.processes import wait_until

GRACE_S = 10
FAKE = {"NIGHTJAR_ENGINE": "fake"}  # where it does not matter what is answered


class Deployment:
    """A broker and its clock; planners and GPU workers of any model are started one by one."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder = folder
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("NIGHTJAR_")}
        self.environment = inherited | {
            "NIGHTJAR_DATABASE_URL": database_url,
            "NIGHTJAR_BROKER_URL": broker_url(folder),
            "NIGHTJAR_VERIFY": "off",  # random weights are never in order
            "NIGHTJAR_DTYPE": "fp32",
            "NIGHTJAR_COMPUTE_THREADS": "1",
            "NIGHTJAR_SWEEP_EVERY_S": "0.3",
            "NIGHTJAR_REDISPATCH_AFTER_S": "1",
            "PYTHONPATH": os.environ.get("PYTHONPATH", str(Path.cwd())),
        }
        self.services: list[Service] = []
        self.redis = redis.Redis(unix_socket_path=str(folder / "broker.sock"))
        wait_for_broker(folder, self._start("broker", broker_command(folder)))
        self._start("beat", beat_command())

    def planner(self, *models: Path, **given: str) -> Service:
        """Start a planner of these models."""
        return self._of_models(WorkerRole.PLAN, models, given)

    def worker(self, *models: Path, **given: str) -> Service:
        """Start a GPU worker of these models, and wait until it takes messages."""
        worker = self._of_models(WorkerRole.COMPUTE, models, given)
        self.wait_ready(worker)
        return worker

    def wait_ready(self, worker: Service) -> None:
        """Wait until a worker takes messages; its log is a new one after each start."""
        wait_until("the worker", lambda: " ready." in worker.log.read_text())

    def _of_models(
        self, role: WorkerRole, models: tuple[Path, ...], given: dict[str, str]
    ) -> Service:
        """Start a worker of this role; a single model is served under any name."""
        name = f"{role.value}-{'-'.join(model.name for model in models)}"
        served = {"NIGHTJAR_MODELS": ",".join(f"{model.name}={model}" for model in models)}
        if len(models) == 1:
            served = {"NIGHTJAR_MODEL": str(models[0]), "NIGHTJAR_ACCEPT_ANY_MODEL": "true"}
        command = [*worker_command(role, Settings.read()), f"--hostname={name}@%h"]
        return self._start(name, command, served | given)

    def messages(self, model: Path) -> int:
        """How many messages wait in the queues of a model."""
        names = compute_queues(ModelDirectory.open(model).fingerprint)
        return sum(self.redis.llen(key) for name in names for key in (name, f"{name}\x06\x169"))  # type: ignore[misc]  # the client may be asynchronous, this one is not

    def stop(self) -> None:
        self.redis.close()
        for service in reversed(self.services):
            service.stop(GRACE_S)

    def _start(self, name: str, command: list[str], given: dict[str, str] | None = None) -> Service:
        log = self.folder / f"{name}-{len(self.services)}.log"
        service = Service(name, command, log, self.environment | (given or {}), self.folder)
        self.services.append(service)
        service.start()
        return service


@contextmanager
def running(database_url: str) -> Iterator[Deployment]:
    """A deployment whose processes end with the block."""
    with tempfile.TemporaryDirectory(prefix="nightjar-") as folder:
        deployment = Deployment(Path(folder), database_url)
        try:
            yield deployment
        finally:
            deployment.stop()
