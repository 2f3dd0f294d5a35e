"""A real system of real processes, each of which can be killed, stopped and started again.

Broker, planner, beat and GPU workers with the shipped fake engine are the commands of a
deployment, on whatever database is named. This process is their supervisor: what ended by itself
is started again while something is waited for, as a restart policy would.
"""

import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import redis

import nightjar
from nightjar.jobs.records import Job, MicroBatchRef, NewJob
from nightjar.jobs.store import Store
from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service
from nightjar.pipeline.queue.commands import WorkerRole, beat_command, worker_command
from nightjar.pipeline.settings import Settings
from tests.faults.rows import request_rows

PATIENCE_S = 600.0
BROKER, PLANNER, BEAT = "broker", "planner", "beat"
_GRACE_S = 20.0

# In a test nobody wants to wait: the same mechanisms, on shorter times.
HASTE = {
    "NIGHTJAR_HEARTBEAT_S": "0.5",
    "NIGHTJAR_SWEEP_EVERY_S": "0.5",
    "NIGHTJAR_WORKER_DEAD_AFTER_S": "5",
    "NIGHTJAR_REDISPATCH_AFTER_S": "6",
}
# Micro-batches of 8 that take a quarter of a second: something is always in flight.
STEADY = {
    "NIGHTJAR_MICRO_BATCH_REQUESTS": "8",
    "NIGHTJAR_FAKE_STEP_S": "0.25",
    "NIGHTJAR_WORKER_THREADS": "4",
}


class System:
    """The processes by name: `broker`, `planner`, `beat`, `worker-0`, `worker-1` and so on.

    Processes must be started from one thread, the one that makes the system: the kernel ends
    them with the thread that started them.

    Args:
        folder: Where logs go.
        database_url: An empty database; its tables are made here.
        model: A model directory; only its tokenizer is used.
        workers: How many GPU workers.
        environment: `NIGHTJAR_*` settings.
    """

    def __init__(
        self,
        folder: Path,
        database_url: str,
        model: Path,
        *,
        workers: int = 1,
        environment: Mapping[str, str] = HASTE | STEADY,
    ) -> None:
        self.folder = folder
        self.database_url = database_url
        self.store = Store(database_url)
        self.workers = [f"worker-{number}" for number in range(workers)]
        self.restarted: Counter[str] = Counter()  # by the supervisor, because they had ended
        self.jobs: list[str] = []
        self.private = Path(tempfile.mkdtemp(prefix="nightjar-"))
        self.broker = redis.Redis(unix_socket_path=str(self.private / "broker.sock"))
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("NIGHTJAR_")}
        self.environment |= {
            "NIGHTJAR_DATABASE_URL": database_url,
            "NIGHTJAR_BROKER_URL": broker_url(self.private),
            "NIGHTJAR_MODEL": str(model.resolve()),
            "NIGHTJAR_MODEL_NAME": "tiny",
            "NIGHTJAR_ENGINE": "fake",
            "NIGHTJAR_VERIFY": "off",  # models of tests have random weights
            "NIGHTJAR_COMPUTE_THREADS": "1",
            "PYTHONPATH": str(Path(nightjar.__file__).parents[1]),
            **environment,
        }
        threads = int(self.environment.get("NIGHTJAR_WORKER_THREADS", "4"))
        settings = Settings.read(worker_threads=threads)
        commands = {
            BROKER: broker_command(self.private),
            PLANNER: worker_command(WorkerRole.PLAN, settings),
            BEAT: beat_command(),
        }
        for name in self.workers:
            command = worker_command(WorkerRole.COMPUTE, settings)
            # Beside each other on one host they need names of their own.
            commands[name] = [
                f"--hostname={name}@%h" if part.startswith("--hostname=") else part
                for part in command
            ]
        self.services = {
            name: Service(name, command, folder / f"{name}.log", self.environment, self.private)
            for name, command in commands.items()
        }
        self._held_down: set[str] = set()  # ended on purpose: the supervisor leaves them

    # Life and death of processes ------------------------------------------------------------

    def start(self, *names: str) -> None:
        """Start services, all of them when none is named; the broker is waited for."""
        for name in names or self.services:
            self._held_down.discard(name)
            self.services[name].start()
            if name == BROKER:
                wait_for_broker(self.private, self.services[BROKER])

    def pid(self, name: str) -> int:
        """Process id of a service that has been started."""
        process = self.services[name].process
        assert process is not None, f"{name} was not started"
        return process.pid

    def is_running(self, name: str) -> bool:
        """Whether the service has been started and has not ended."""
        process = self.services[name].process
        return process is not None and process.poll() is None

    def start_another(self, like: str) -> str:
        """Start a second process like one that runs; returns its name."""
        first, name = self.services[like], f"{like}-2"
        command = [
            f"--hostname={name}@%h" if part.startswith("--hostname=") else part
            for part in first.command
        ]
        log = first.log.with_name(f"{name}.log")
        self.services[name] = Service(name, command, log, first.environment, first.directory)
        self.start(name)
        return name

    def kill(self, name: str) -> None:
        """SIGKILL, and wait for the end; it stays down until `start`."""
        self._held_down.add(name)
        process = self.services[name].process
        assert process is not None
        process.kill()
        process.wait()

    def terminate(self, name: str) -> None:
        """SIGTERM; it stays down once it has ended, until `start`."""
        self._held_down.add(name)
        os.kill(self.pid(name), signal.SIGTERM)

    def restart(self, name: str) -> None:
        """Kill and start again."""
        self.kill(name)
        self.start(name)

    def freeze(self, name: str) -> None:
        """SIGSTOP, until `thaw`, at a moment when it does not hold SQLite's one write lock.

        With that lock in its hand it would stop every other process as well.
        """
        stop = partial(os.kill, self.pid(name), signal.SIGSTOP)
        self.store.database.write(lambda _: stop())

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        os.kill(self.pid(name), signal.SIGCONT)

    def supervise(self) -> None:
        """Start again whatever ended by itself."""
        for name, service in self.services.items():
            if name in self._held_down or service.process is None or service.process.poll() is None:
                continue
            self.restarted[name] += 1
            self.start(name)

    def close(self) -> None:
        """End every process, whatever state it is in."""
        for name in self.services:
            if self.is_running(name):
                with suppress(ProcessLookupError):
                    self.thaw(name)
        for service in self.services.values():
            if service.name != BROKER and service.process is not None:
                service.process.terminate()
        for service in reversed(self.services.values()):  # the broker last
            service.stop(_GRACE_S)
        self.broker.close()
        self.store.close()
        shutil.rmtree(self.private, ignore_errors=True)

    # Work -----------------------------------------------------------------------------------

    def submit(self, count: int, *, priority: int = 0) -> str:
        """A job of the first `count` rows of `request_rows`; beat finds it at its next tick."""
        with self.store.jobs.submit(NewJob("tiny", priority=priority)) as submission:
            submission.add(request_rows(count))
        self.jobs.append(submission.job_id)
        return submission.job_id

    def wait_until(
        self, what: str, condition: Callable[[], object], patience_s: float = PATIENCE_S
    ) -> float:
        """Poll until the condition holds, supervising; returns the seconds that it took."""
        started = time.monotonic()
        while not condition():
            waited_s = time.monotonic() - started
            if waited_s > patience_s:
                raise AssertionError(f"waited {waited_s:.0f} s in vain for {what}\n{self.logs()}")
            self.supervise()
            time.sleep(0.02)
        return time.monotonic() - started

    def wait_done(self, patience_s: float = PATIENCE_S) -> float:
        """Until every job that was submitted is over; returns the seconds that it took."""
        return self.wait_until("the jobs", lambda: not self.open_jobs(), patience_s)

    def open_jobs(self) -> list[Job]:
        """The submitted jobs that are not over."""
        found = [self.store.jobs.get(job_id) for job_id in self.jobs]
        return [job for job in found if not job.is_over]

    def owner(self, name: str) -> str | None:
        """Under what name a worker's present process holds leases; None while it holds none."""
        part = f":{self.pid(name)}:"
        owners = [
            beat.owner for beat in self.store.heartbeats.of_lease_holders() if part in beat.owner
        ]
        return owners[0] if owners else None

    def leases(self, name: str) -> list[MicroBatchRef]:
        """The micro-batches that a worker's present process holds."""
        owner = self.owner(name)
        return [] if owner is None else self.store.leases.held_by(owner)

    def compute_process(self, name: str) -> psutil.Process | None:
        """The compute process below a worker, if there is one now."""
        for child in psutil.Process(self.pid(name)).children():
            with suppress(psutil.NoSuchProcess):
                if any("gpu_worker.compute" in word for word in child.cmdline()):
                    return child
        return None

    def log(self, name: str) -> str:
        """All that a service has written."""
        path = self.services[name].log
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def logs(self) -> str:
        """The ends of all logs, for a failed test."""
        return "\n".join(
            f"--- {name}\n{service.log_tail()}"
            for name, service in self.services.items()
            if service.process is not None
        )


@contextmanager
def running_system(
    folder: Path,
    database_url: str,
    model: Path,
    *,
    workers: int = 1,
    environment: Mapping[str, str] = HASTE | STEADY,
    prepare: Callable[[System], None] = lambda _: None,
) -> Iterator[System]:
    """A system whose tables are made and whose processes run; they end with the block.

    `prepare` may change the services' commands and environments before they start.
    """
    system = System(folder, database_url, model, workers=workers, environment=environment)
    try:
        system.store.migrate()
        prepare(system)
        system.start()
        yield system
    finally:
        system.close()
