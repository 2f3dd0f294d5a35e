"""Plain Celery as real processes, to do the same faults to it."""

import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import redis
import sqlalchemy as sa
from celery import Celery

import nightjar
from nightjar.jobs.store.database import database_url as usable_url
from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service
from tests.faults.plain_app import BACK_AFTER_S, TASK

STEP_S = 0.25
THREADS = 4
QUEUE = "celery"
QUIET_S = 2.0 * BACK_AFTER_S + 10.0  # no message comes back after so long
PATIENCE_S = 600.0
STILL_S = 60.0  # longer than a message takes to come back
_GRACE_S = 20.0


class PlainSystem:
    """A broker, a worker with four threads (or several), and this process as the client."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.private = Path(tempfile.mkdtemp(prefix="plain-"))
        self.journal = folder / "journal"
        self.journal.touch()
        self.url = database_url
        self._database = usable_url(database_url)
        backend = self._database.render_as_string(hide_password=False)
        self.ids: list[str] = []
        self.ended: Counter[str] = Counter()  # processes that ended by themselves
        self.stood_still = 0  # times that the worker had to be killed to go on
        self.broker = redis.Redis(unix_socket_path=str(self.private / "broker.sock"))
        root = str(Path(nightjar.__file__).parents[1])
        environment = os.environ | {
            "PLAIN_BROKER": broker_url(self.private),
            "PLAIN_BACKEND": f"db+{backend}",
            "PLAIN_JOURNAL": str(self.journal),
            "PYTHONPATH": root,
        }
        log = folder / "plain-broker.log"
        command = broker_command(self.private)
        self.services = {"broker": Service("broker", command, log, environment, self.private)}
        self._folder, self._environment = folder, environment
        self.add_worker("worker")
        self._client = Celery("client", broker=broker_url(self.private))
        self._held_down: set[str] = set()

    def add_worker(self, name: str, environment: Mapping[str, str] | None = None) -> None:
        """One more worker, which `start` will start; it finds `environment` beside the rest."""
        command = [sys.executable, "-m", "celery", "-A", "tests.faults.plain_app", "worker"]
        command += ["--pool=threads", f"--concurrency={THREADS}", "--loglevel=INFO"]
        command += ["--without-gossip", "--without-mingle", f"--hostname={name}@here"]
        log, whole = self._folder / f"plain-{name}.log", self._environment | (environment or {})
        self.services[name] = Service(name, command, log, whole, self.private)

    def start(self, *names: str) -> None:
        """Start services, all when none is named."""
        for name in names or self.services:
            self._held_down.discard(name)
            self.services[name].start()
            if name == "broker":
                wait_for_broker(self.private, self.services["broker"])

    def kill(self, name: str) -> None:
        """SIGKILL; it stays down until `start`."""
        self._held_down.add(name)
        process = self.services[name].process
        assert process is not None
        process.kill()
        process.wait()

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a service."""
        process = self.services[name].process
        assert process is not None
        process.send_signal(number)

    def restart(self, name: str) -> None:
        """Kill and start again."""
        self.kill(name)
        self.start(name)

    def submit(self, count: int, seconds: float = STEP_S) -> None:
        """A task for each request."""
        for _ in range(count):
            self.submit_text(f"row number {len(self.ids)}", seconds)

    def submit_text(self, text: str, seconds: float) -> None:
        """A task for this request."""
        self.ids.append(self._client.send_task(TASK, (text, seconds)).id)

    def wait_until_working(self) -> None:
        """Until tasks run; more are sent when few are left."""
        if self.broker.llen(QUEUE) < 10 * THREADS:  # what is lost waits nowhere
            self.submit(20 * THREADS)
        began = self._journal("began").total()
        deadline = time.monotonic() + PATIENCE_S
        still_at = time.monotonic() + STILL_S
        while self._journal("began").total() == began:
            assert time.monotonic() < deadline, self.services["worker"].log_tail()
            if time.monotonic() > still_at:  # alive, but it takes up nothing: somebody must see it
                self.stood_still += 1
                self.restart("worker")
                still_at = time.monotonic() + STILL_S
            self.supervise()
            time.sleep(0.05)

    def let_pass(self, seconds: float) -> None:
        """Time goes by, and the supervisor works."""
        over = time.monotonic() + seconds
        while time.monotonic() < over:
            self.supervise()
            time.sleep(0.05)

    def supervise(self) -> None:
        """Start again what ended by itself."""
        for name, service in self.services.items():
            if name in self._held_down or service.process is None or service.process.poll() is None:
                continue
            self.ended[name] += 1
            self.start(name)

    def wait_done(self, at_most_s: float = math.inf) -> None:
        """Until all tasks have landed, or the broker has none left and nothing happens any more."""
        seen, since = (-1, 0), time.monotonic()
        over = since + at_most_s
        while self.landed() < len(self.ids) and time.monotonic() < over:
            self.supervise()
            lines = self._journal("began").total() + self._journal("ended").total()
            # What the broker still has is not lost, however long the worker takes for it.
            held = self.broker.llen(QUEUE) + self.broker.hlen("unacked")
            if (lines, held) != seen:
                seen, since = (lines, held), time.monotonic()
            if time.monotonic() - since > (PATIENCE_S if held else QUIET_S):
                break
            time.sleep(0.25)
        self.let_pass(1.0)

    def landed(self) -> int:
        """How many tasks have their outcome in SQL: an answer, or the error that they asked for."""
        engine = sa.create_engine(self._database, poolclass=sa.NullPool)
        count = (
            "SELECT count(*) FROM celery_taskmeta WHERE status = 'SUCCESS' OR traceback LIKE :as"
        )
        try:
            with engine.connect() as connection:
                return int(connection.scalar(sa.text(count), {"as": "%PoisonError%"}) or 0)
        except sa.exc.DBAPIError:  # no table before the worker has made it
            return 0

    def figures(self) -> dict[str, int]:
        """How many requests there were; were lost; had two outcomes; were begun again."""
        began, ended = self._journal("began"), self._journal("ended")
        return {
            "requests": len(self.ids),
            "lost": len(self.ids) - self.landed(),
            "twice": sum(times > 1 for times in ended.values()),
            "recomputed": began.total() - len(began),
        }

    def close(self) -> None:
        """End all processes, the broker last."""
        for service in reversed(self.services.values()):
            service.stop(_GRACE_S)
        self._client.close()
        self.broker.close()
        shutil.rmtree(self.private, ignore_errors=True)

    def _journal(self, what: str) -> Counter[str]:
        """How often this is noted of each task."""
        lines = self.journal.read_text(encoding="ascii").splitlines()
        return Counter(line.partition(" ")[2] for line in lines if line.startswith(what))


@contextmanager
def plain_system(folder: Path, database_url: str) -> Iterator[PlainSystem]:
    """Broker and worker run; they end with the block."""
    system = PlainSystem(folder, database_url)
    try:
        system.start()
        yield system
    finally:
        system.close()
