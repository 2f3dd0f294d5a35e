"""Plain Celery beside Nightjar: the same requests, the same fake engine, the same database."""

import sys
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from celery import Celery

from benchmarks.control_plane.requests import body, prompts
from benchmarks.control_plane.services import Database, Deployment, logs_in, wait_until
from benchmarks.control_plane.watch import travelled
from nightjar.jobs.store.database import database_url as with_driver
from nightjar.pipeline.embedded.processes import Service
from tests.faults.system import BROKER, System, running_system

PROCESSES = 2
TASK = "plain.generate"
_PATIENCE_S = 300.0


def measure(database: Database, model: Path, folder: Path, requests: int) -> dict[str, Any]:
    """Send a task for each request; the time ends with the last result in SQL."""
    backend = with_driver(database.url).render_as_string(hide_password=False)
    environment = {"PLAIN_BACKEND": f"db+{backend}", "PLAIN_MODEL": str(model.resolve())}
    started = running_system(
        logs_in(folder), database.url, model, environment=environment, prepare=_celery_alone
    )
    with started as system:
        # Of its own for each database: an application keeps its connections.
        broker = system.environment["NIGHTJAR_BROKER_URL"]
        app = Celery("plain", broker=broker, backend=f"db+{backend}")
        engine = sa.create_engine(backend)
        try:
            return _run(app, engine, Deployment(system, database), list(prompts(model, requests)))
        finally:
            engine.dispose()
            app.close()


def _celery_alone(system: System) -> None:
    """Put a worker of plain Celery in the place of Nightjar's services."""
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.control_plane.celery_app"]
    command += ["worker", f"--concurrency={PROCESSES}", "--loglevel=WARNING"]
    command += ["--without-gossip", "--without-mingle"]
    log = system.folder / "worker.log"
    worker = Service("worker", command, log, system.environment, system.private)
    system.services = {BROKER: system.services[BROKER], "worker": worker}


def _run(app: Celery, engine: sa.Engine, running: Deployment, texts: list[str]) -> dict[str, Any]:
    for warm in range(2 * PROCESSES):  # each process builds its parts
        app.send_task(TASK, (f"warm-{warm}", body(texts[0])))
    _wait_for(engine, 2 * PROCESSES, 0.1)
    with running.watch() as watch:
        started = time.monotonic()
        for index, text in enumerate(texts):
            app.send_task(TASK, (f"row-{index}", body(text)))
        sent = time.monotonic()
        _wait_for(engine, 2 * PROCESSES + len(texts), 0.25)
        ended = time.monotonic()
    return travelled(len(texts), started, sent, ended, watch)


def _wait_for(engine: sa.Engine, results: int, every_s: float) -> None:
    """Until so many results have landed."""
    # Rows are never deleted here; a count of them would take longer the more there are.
    count = sa.text("SELECT max(id) FROM celery_taskmeta")

    def landed() -> int:
        try:
            with engine.connect() as connection:
                return connection.scalar(count) or 0
        except sa.exc.DBAPIError:  # no table before the first result
            return 0

    wait_until(lambda: landed() >= results, _PATIENCE_S, every_s)
