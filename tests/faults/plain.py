"""Plain Celery as real processes, to do the same faults to it."""

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
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
_GRACE_S = 20.0


class PlainSystem:
    """A broker, one worker with four threads, and this process as the client."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.private = Path(tempfile.mkdtemp(prefix="plain-"))
        self.journal = folder / "journal"
        self.journal.touch()
        self._database = usable_url(database_url)
        backend = self._database.render_as_string(hide_password=False)
        self.ids: list[str] = []
        self.ended: Counter[str] = Counter()  # processes that ended by themselves
        self.broker = redis.Redis(unix_socket_path=str(self.private / "broker.sock"))
        root = str(Path(nightjar.__file__).parents[1])
        environment = os.environ | {
            "PLAIN_BROKER": broker_url(self.private),
            "PLAIN_BACKEND": f"db+{backend}",
            "PLAIN_JOURNAL": str(self.journal),
            "PYTHONPATH": root,
        }
        worker = [sys.executable, "-m", "celery", "-A", "tests.faults.plain_app", "worker"]
        worker += ["--pool=threads", f"--concurrency={THREADS}", "--loglevel=INFO"]
        worker += ["--without-gossip", "--without-mingle"]
        self.services = {
            "broker": Service(
                "broker",
                broker_command(self.private),
                folder / "plain-broker.log",
                environment,
                self.private,
            ),
            "worker": Service("worker", worker, folder / "plain.log", environment, self.private),
        }
        self._client = Celery("client", broker=broker_url(self.private))
        self._held_down: set[str] = set()

    def start(self, *names: str) -> None:
        """Start services, both when none is named."""
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

    def restart(self, name: str) -> None:
        """Kill and start again."""
        self.kill(name)
        self.start(name)

    def submit(self, count: int, seconds: float = STEP_S) -> None:
        """A task for each request."""
        for _ in range(count):
            text = f"row number {len(self.ids)}"
            self.ids.append(self._client.send_task(TASK, (text, seconds)).id)

    def wait_until_working(self) -> None:
        """Until tasks run; more are sent when few are left."""
        if self.broker.llen(QUEUE) < 10 * THREADS:  # what is lost waits nowhere
            self.submit(20 * THREADS)
        began = self._journal("began").total()
        deadline = time.monotonic() + PATIENCE_S
        while self._journal("began").total() == began:
            assert time.monotonic() < deadline, self.services["worker"].log_tail()
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

    def wait_done(self) -> None:
        """Until all tasks have landed, or the broker has none left and nothing happens any more."""
        seen, since = (-1, 0), time.monotonic()
        while self.landed() < len(self.ids):
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
        """How many tasks have a result in SQL."""
        engine = sa.create_engine(self._database, poolclass=sa.NullPool)
        try:
            with engine.connect() as connection:
                count = sa.text("SELECT count(*) FROM celery_taskmeta WHERE status = 'SUCCESS'")
                return int(connection.scalar(count) or 0)
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
        """End both processes."""
        self.services["worker"].stop(_GRACE_S)
        self.services["broker"].stop(_GRACE_S)
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
