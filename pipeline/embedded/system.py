"""Broker, planner and GPU worker as child processes: the deployment of one machine."""

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from pydantic import SecretStr

import nightjar
from nightjar.jobs.store import Store
from nightjar.jobs.workers import Crash
from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service, private_directory
from nightjar.pipeline.queue.commands import WorkerRole, beat_command, worker_command
from nightjar.pipeline.settings import Settings

_STOP_GRACE_S = 10.0
DRAIN_S = 5.0  # shorter: the GPU worker then gives back its leases and ends


class EmbeddedSystem:
    """Starts the services, keeps them running, and ends them with this process.

    Args:
        store: The store that `settings` names; no other worker holds leases in it.
        settings: Database, model and limits; the broker is this system's own.
        logs: Directory of the services' logs.
        report: Called with one line when a service was restarted.
    """

    def __init__(
        self, store: Store, settings: Settings, logs: Path, report: Callable[[str], None]
    ) -> None:
        self._store = store
        self._report = report
        # Here a worker ends only by a crash, so its deaths are limited like crashes.
        deaths = min(settings.request_crashes, settings.request_worker_deaths)
        settings = settings.model_copy(update={"request_worker_deaths": deaths})
        self._deaths_allowed = deaths
        logs.mkdir(exist_ok=True)
        self._directory = private_directory()
        # The results of a file that was computed long ago are still to be written.
        settings = settings.model_copy(
            update={"keep_results_days": None, "metrics_address": ""}  # it is one process's
        )
        environment = os.environ | _environment(settings, broker_url(self._directory))
        environment.pop("NIGHTJAR_KEEP_RESULTS_DAYS", None)

        def service(name: str, command: list[str]) -> Service:
            log = logs.resolve() / f"{name}.log"
            return Service(name, command, log, environment, self._directory)

        self.broker = service("broker", broker_command(self._directory))
        self._gpu_worker = service("gpu-worker", worker_command(WorkerRole.COMPUTE, settings))
        self._workers = [
            self._gpu_worker,
            service("planner", worker_command(WorkerRole.PLAN, settings)),
            service("beat", beat_command()),
        ]

    def __enter__(self) -> "EmbeddedSystem":
        try:
            self.start_broker()
            self._take_back(crash=None)  # from an earlier run that was killed as a whole
            for worker in self._workers:
                worker.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start_broker(self) -> None:
        """Start the private broker alone, and wait until it answers.

        Raises:
            ServiceError: It cannot start.
        """
        self.broker.start()
        wait_for_broker(self._directory, self.broker)

    def watch(self) -> None:
        """Restart services that have ended.

        Raises:
            ServiceError: A service cannot start, or ends again and again.
        """
        if self.broker.keep_running():
            self._report("the broker ended and was started again")
            wait_for_broker(self._directory, self.broker)
            self._store.planning.requeue(self._store.planning.dispatched())
        for worker in self._workers:
            if worker.keep_running():
                self._report(f"the {worker.name} ended and was started again")
                if worker is self._gpu_worker:
                    crash = Crash("the GPU worker ended", self._deaths_allowed, of_worker=True)
                    self._take_back(crash)

    def progressed(self) -> None:
        """Forget earlier ends of services, because results have landed since."""
        for service in [*self._workers, self.broker]:
            service.progressed()

    def terminate(self) -> None:
        """Ask the services to end, but for the broker; `stop` waits for them."""
        for service in self._workers:
            if service.process is not None:
                service.process.terminate()

    def stop(self) -> None:
        """End everything, the broker last."""
        self.terminate()
        for service in [*self._workers, self.broker]:
            service.stop(_STOP_GRACE_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _take_back(self, crash: Crash | None) -> None:
        """Make the micro-batches of a GPU worker ready again after it has ended.

        Its leased requests become suspects of the `crash`, if there was one.
        """
        for beat in self._store.heartbeats.of_lease_holders():
            if crash is None:
                self._store.leases.give_back_all(beat.owner)
            else:
                self._store.suspects.add_owner(beat.owner, crash)
        self._store.planning.requeue(self._store.planning.dispatched())


def _environment(settings: Settings, broker: str) -> dict[str, str]:
    values = settings.model_dump(mode="json", exclude_none=True)
    for name in values:
        if isinstance(secret := getattr(settings, name), SecretStr):
            values[name] = secret.get_secret_value()
    # A key of its own: no other process may send messages of this run.
    values |= {"broker_url": broker, "message_key": secrets.token_hex(32)}
    variables = {f"NIGHTJAR_{name.upper()}": str(value) for name, value in values.items()}
    # The services run in another directory, so they need the path of a checkout.
    paths = [str(Path(nightjar.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
