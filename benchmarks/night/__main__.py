"""A night of hundreds of GPU workers on this machine: `python -m benchmarks.night`.

PostgreSQL, Valkey, the API, planner and beat are real. The GPU workers are threads of a few Celery
processes (`workers.py`); they do all that a GPU worker does to the database and the broker.
Files of --file-rows rows are uploaded one after another, a few jobs ahead of the work.

Each size of --rows is a night of its own. What the first costs for each row predicts the seconds,
the log and the disk of the others. `model` says what a deployment of 50 machines needs by that.
"""

import json
import os
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult
from pathlib import Path

import psutil
import sqlalchemy as sa

from benchmarks.control_plane.services import Deployment, fresh_database, logs_in, wait_until
from benchmarks.harness import Benchmark, Figures
from benchmarks.night.uploads import upload
from nightjar.pipeline.queue.commands import GPU_WORKER_APP
from tests.faults.api import answers_http, give_api
from tests.faults.system import System, running_system
from tests.services import free_port

LOOK_EVERY_S = 2.0
SETTINGS = {
    "NIGHTJAR_HEARTBEAT_S": "5",
    "NIGHTJAR_DISPATCH_WINDOW": "600",
    "NIGHTJAR_MICRO_BATCH_REQUESTS": "64",
}
DATABASE_CORES = 16  # of the model's server of PostgreSQL
GROUPS = ("database", "broker", "planner", "api")


def measure(args: Namespace, folder: Path) -> Figures:
    """A night of each size, predictions of the later ones, and the model."""
    nights: list[Figures] = []
    for rows in map(int, args.rows.split(",")):
        nights.append(night(args, folder / str(rows), rows))
        (args.work / "night-so-far.json").write_text(json.dumps(nights, indent=1))
    found: Figures = {f"rows_{one['rows']}": one for one in nights}
    for one in nights[1:]:
        one["predicted"] = predicted(nights[0], one)
    return found | {"model": model(nights[-1])}


def night(args: Namespace, folder: Path, rows: int) -> Figures:
    """So many rows from their upload to their results."""
    with deployed(args, folder) as running, running.watch(shared=False) as watch:
        store, began = running.system.store, time.monotonic()
        before = written_bytes(running)
        with get_context("spawn").Pool(1) as pool:
            uploads = pool.apply_async(upload, (running.api_url, str(folder), rows, args.file_rows))
            landed = list(_follow(running, rows, began, uploads))
        seconds = time.monotonic() - began
        log, stored = (
            after - start for after, start in zip(written_bytes(running), before, strict=True)
        )
        with store.database.reading() as connection:
            results = connection.scalar(sa.text("SELECT count(*) FROM result"))
            failed = connection.scalar(sa.text("SELECT coalesce(sum(failed), 0) FROM job"))
            beats = connection.scalar(sa.text("SELECT coalesce(sum(counter), 0) FROM worker"))
    cpu = watch.cpu_s
    spent = {name: cpu.get(name, 0.0) for name in GROUPS}
    spent["workers"] = sum(own for name, own in cpu.items() if "worker" in name)
    spent["client"] = cpu.get("client", 0.0)
    rates = [b - a for (_, a), (_, b) in pairwise(landed)]
    quarter = max(1, len(rates) // 4)
    return {
        "rows": rows,
        "workers": args.workers,
        "seconds": round(seconds, 1),
        "rows_per_s": round(rows / seconds),
        "last_quarter_over_second": round(
            sum(rates[-quarter - 1 : -1]) / max(1, sum(rates[quarter : 2 * quarter])), 2
        ),
        "lost": rows - int(results or 0),
        "failed": int(failed or 0),
        "beats_per_s": round(float(beats or 0) / seconds, 1),
        "log_bytes_per_row": round(log / rows),
        "stored_bytes_per_row": round(stored / rows),
        "cpu_us_per_row": {name: round(1e6 * own / rows, 1) for name, own in spent.items()},
        "peak_mib": {name: one["peak_mib"] for name, one in watch.memory().items()},
    }


@contextmanager
def deployed(args: Namespace, folder: Path) -> Iterator[Deployment]:
    """The services, with processes that stand for the GPU workers."""
    port = free_port()
    environment = SETTINGS | {
        "NIGHT_STEP_S": str(args.step_s),
        "NIGHT_WORKERS": str(args.workers // args.processes),
        "NIGHTJAR_WORKER_THREADS": str(args.workers // args.processes),
    }

    def prepare(system: System) -> None:
        give_api(port, system)
        for name in system.workers:
            service = system.services[name]
            service.command = [
                "benchmarks.night.workers" if word == GPU_WORKER_APP else word
                for word in _with_celery(service.command)
            ]

    with (
        fresh_database("postgresql", folder) as database,
        running_system(
            logs_in(folder),
            database.url,
            args.model,
            workers=args.processes,
            environment=environment,
            prepare=prepare,
        ) as system,
    ):
        url = f"http://127.0.0.1:{port}"
        wait_until(partial(answers_http, url))
        yield _Night(system, database, url)


class _Night(Deployment):
    """As Deployment, without a compute process."""

    def processes(self) -> dict[str, psutil.Process]:
        return (
            {"client": psutil.Process()}
            | self.database.servers
            | {name: psutil.Process(self.system.pid(name)) for name in self.system.services}
        )


def _with_celery(command: Sequence[str]) -> list[str]:
    """The plain command of Celery in the place of the GPU worker's own."""
    return [
        "nightjar.pipeline.queue.celery_command" if word == "nightjar.gpu_worker.worker" else word
        for word in command
    ]


def written_bytes(running: Deployment) -> tuple[int, int]:
    """Bytes of the write-ahead log so far, and of the database."""
    query = sa.text(
        "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint,"
        " pg_database_size(current_database())"
    )
    with running.system.store.database.reading() as connection:
        log, stored = connection.execute(query).one()
    return int(log), int(stored)


def _follow(
    running: Deployment, rows: int, began: float, uploads: AsyncResult[None]
) -> Iterator[tuple[float, int]]:
    """Yield (seconds, rows that have landed) every LOOK_EVERY_S, until all have."""
    query = sa.text("SELECT coalesce(sum(completed + failed), 0) FROM job")
    landed = 0
    while landed < rows:
        time.sleep(LOOK_EVERY_S)
        if uploads.ready():
            uploads.get()  # raises what went wrong
        running.system.supervise()
        with running.system.store.database.reading() as connection:
            landed = int(connection.scalar(query) or 0)
        yield time.monotonic() - began, landed


def predicted(first: Figures, other: Figures) -> Figures:
    """What the costs of one night say of another, over what was measured."""
    cores = os.cpu_count() or 1
    busy = cores * 1e6 / sum(first["cpu_us_per_row"].values())
    efficiency = first["rows_per_s"] / busy
    costs = sum(other["cpu_us_per_row"].values())
    said = {
        "rows_per_s": first["rows_per_s"],
        "log_bytes_per_row": first["log_bytes_per_row"],
        "stored_bytes_per_row": first["stored_bytes_per_row"],
        "cpu_us_per_row": round(sum(first["cpu_us_per_row"].values()), 1),
    }
    found = {name: other[name] for name in said if name != "cpu_us_per_row"}
    found["cpu_us_per_row"] = costs
    return {
        "cores_in_use": round(cores * efficiency, 2),
        **{f"{name}_over_measured": round(said[name] / found[name], 3) for name in said},
    }


def model(night: Figures, rows: int = 100_000_000, hours: float = 8.0) -> Figures:
    """What so many rows in so many hours take, by the costs of a night, and what is full first.

    One planner, one API process and one broker have a core each; PostgreSQL has DATABASE_CORES.
    """
    rate, costs = rows / (hours * 3_600), night["cpu_us_per_row"]
    full_at = {name: round(1e6 / costs[name]) for name in ("planner", "api", "broker")}
    full_at["database"] = round(DATABASE_CORES * 1e6 / costs["database"])
    return {
        "rows": rows,
        "hours": hours,
        "rows_per_s": round(rate),
        "cores": {name: round(rate * own / 1e6, 2) for name, own in costs.items()},
        "full_at_rows_per_s": full_at,
        "first_full": min(full_at, key=lambda name: full_at[name]),
        "log_mb_per_s": round(rate * night["log_bytes_per_row"] / 1e6, 1),
        "stored_gb": round(rows * night["stored_bytes_per_row"] / 1e9),
    }


OPTIONS = {
    "--rows": ("100000,300000,1000000", "of each night"),
    "--workers": (200, "GPU workers"),
    "--processes": (4, "that stand for them"),
    "--step-s": (0.5, "seconds that a micro-batch computes"),
    "--file-rows": (250_000, "rows of a job"),
}
BENCHMARK = Benchmark("night", __doc__, measure, options=OPTIONS)

if __name__ == "__main__":
    BENCHMARK.main()
