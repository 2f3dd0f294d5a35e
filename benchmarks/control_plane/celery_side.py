"""Plain Celery beside Nightjar: the same requests, the same fake engine, the same database."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import redis
import sqlalchemy as sa
from celery import Celery

import nightjar
from benchmarks.control_plane.requests import body, prompts
from benchmarks.control_plane.watch import Watch
from nightjar.jobs.store.database import database_url as with_driver
from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service

PROCESSES = 2
TASK = "plain.generate"
_GRACE_S = 20.0
_PATIENCE_S = 300.0


def measure(
    database_url: str, servers: dict[str, psutil.Process], model: Path, logs: Path, requests: int
) -> dict[str, Any]:
    """Send a task for each request; the time ends with the last result in SQL."""
    logs.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(prefix="plain-"))
    backend = with_driver(database_url).render_as_string(hide_password=False)
    variables = {
        "PLAIN_BROKER": broker_url(private),
        "PLAIN_BACKEND": f"db+{backend}",
        "PLAIN_MODEL": str(model.resolve()),
        "PYTHONPATH": str(Path(nightjar.__file__).parents[1]),
    }
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.control_plane.celery_app"]
    command += ["worker", f"--concurrency={PROCESSES}", "--loglevel=WARNING"]
    command += ["--without-gossip", "--without-mingle"]
    environment = os.environ | variables
    log = logs.resolve()
    broker = Service("broker", broker_command(private), log / "broker.log", environment, private)
    worker = Service("worker", command, log / "worker.log", environment, private)
    try:
        broker.start()
        wait_for_broker(private, broker)
        worker.start()
        watched = servers | {"client": psutil.Process()}
        for name, service in (("broker", broker), ("worker", worker)):
            assert service.process is not None
            watched[name] = psutil.Process(service.process.pid)
        return _run(variables, watched, private, list(prompts(model, requests)))
    finally:
        worker.stop(_GRACE_S)
        broker.stop(_GRACE_S)
        shutil.rmtree(private, ignore_errors=True)


def _run(
    variables: dict[str, str], watched: dict[str, psutil.Process], private: Path, texts: list[str]
) -> dict[str, Any]:
    # Of its own for each database: an application keeps its connections.
    app = Celery("plain", broker=variables["PLAIN_BROKER"], backend=variables["PLAIN_BACKEND"])
    for warm in range(2 * PROCESSES):  # each process builds its parts
        app.send_task(TASK, (f"warm-{warm}", body(texts[0])))
    engine = sa.create_engine(variables["PLAIN_BACKEND"].removeprefix("db+"))
    _wait_for(engine, 2 * PROCESSES, 0.1)
    client = redis.Redis(unix_socket_path=str(private / "broker.sock"))

    def broker_bytes() -> int:
        return int(client.info("memory")["used_memory"])

    with Watch(watched, broker_bytes) as watch:
        started = time.monotonic()
        for index, text in enumerate(texts):
            app.send_task(TASK, (f"row-{index}", body(text)))
        sent = time.monotonic()
        _wait_for(engine, 2 * PROCESSES + len(texts), 0.25)
        ended = time.monotonic()
    engine.dispose()
    client.close()
    app.close()
    count = len(texts)
    return {
        "requests": count,
        "seconds": round(ended - started, 2),
        "submit_seconds": round(sent - started, 2),
        "requests_per_s": round(count / (ended - started), 1),
        "cpu_us_per_request": {
            name: round(spent / count * 1e6, 1) for name, spent in watch.cpu_s.items()
        },
        "memory": watch.memory(),
    }


def _wait_for(engine: sa.Engine, results: int, every_s: float) -> None:
    """Until so many results have landed."""
    deadline = time.monotonic() + _PATIENCE_S
    # Rows are never deleted here; a count of them would take longer the more there are.
    count = sa.text("SELECT max(id) FROM celery_taskmeta")
    while True:
        try:
            with engine.connect() as connection:
                landed = connection.scalar(count)
        except sa.exc.DBAPIError:  # no table before the first result
            landed = 0
        if landed is not None and landed >= results:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"only {landed} of {results} results after {_PATIENCE_S:.0f} s")
        time.sleep(every_s)
