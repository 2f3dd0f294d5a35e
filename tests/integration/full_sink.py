"""A sink on a disk of its own that is too small, told as JSON on standard output.

    python -m tests.integration.full_sink DISK KIND

`command` mounts the disk at DISK, which nobody else sees.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from nightjar.jobs.records import ResultRecord
from nightjar.pipeline.tables.databases import database_url, open_database
from nightjar.pipeline.tables.sinks.sink import Sink, SinkWriteError
from tests import small_disk
from tests.acceptance.full_disk import fill
from tests.faults.full_disk import disk_with_database
from tests.tables import generated, many, rows_of, sink

MIB = 1 << 20
DISK_BYTES = {"postgresql": 192 * MIB}
USUAL_BYTES = 64 * MIB
ROWS = 10_000
_BEFORE = 5_000  # rows until the disk fills up: a SQL sink stages 4,096 at once
TARGETS: dict[str, dict[str, Any]] = {
    "jsonl": {"jsonl": "{disk}/out.jsonl"},
    "parquet": {"parquet": "{disk}/out.parquet"},
    "folder": {"parquet": "{disk}/out/"},
    "sqlite": {"sql": {"url": "sqlite:///{disk}/own.db", "table": "answers"}},
    "postgresql": {"sql": {"url": "env:SINK_URL", "table": "answers"}},
}


def command(disk: Path, kind: str) -> list[str]:
    """The command line that runs this file with a small disk mounted at `disk`."""
    size, is_served = DISK_BYTES.get(kind, USUAL_BYTES), kind in DISK_BYTES
    return small_disk.command(__name__, disk, size, disk, kind, ordinary_user=is_served)


class Target:
    """Where the sink writes to, and what is there.

    Args:
        config: The `[sink]` table.
        environment: Where `env:NAME` is looked up.
    """

    def __init__(self, config: dict[str, Any], environment: dict[str, str]) -> None:
        self._config = config
        self._environment = environment
        self._engine: sa.Engine | None = None
        if "sql" in config:
            self._engine = open_database(database_url(config["sql"]["url"], environment))

    def sink(self, run: str) -> Sink:
        """The sink of a run."""
        return sink(run=run, environment=self._environment, **self._config)

    def rows(self) -> list[list[Any]]:
        """The keys and the answers."""
        if self._engine is None:
            (path,) = self._config.values()
            return [[one["user"], one["text"]] for one in rows_of(Path(path))]
        with self._engine.begin() as connection:
            found = connection.exec_driver_sql('SELECT "user", text FROM answers')
            return [list(row) for row in found]

    def tables(self) -> list[str]:
        """The tables of the database, if it is one."""
        if self._engine is None:
            return []
        with self._engine.begin() as connection:
            return sorted(sa.inspect(connection).get_table_names())


@contextmanager
def on_the_disk(disk: Path, kind: str) -> Iterator[tuple[Target, Callable[[], None]]]:
    """The target, and what gives the disk its room again."""
    config = json.loads(json.dumps(TARGETS[kind]).replace("{disk}", str(disk)))
    if kind == "postgresql":
        with disk_with_database(kind, disk) as served:
            yield Target(config, {"SINK_URL": served.url}), served.free
    else:
        yield Target(config, {}), (disk / "filler").unlink


def results(fill_up: Callable[[], object]) -> Iterator[ResultRecord]:
    """Results of a run; the disk fills up after some of them."""
    yield from many(_BEFORE)
    fill_up()
    yield from many(ROWS, text="x" * 1_000, start=_BEFORE)


def main(disk: Path, kind: str) -> None:
    with on_the_disk(disk, kind) as (target, free):
        target.sink("old").write([generated(0, "a", "old")])
        opened = target.sink("new")
        opened.check()
        told: dict[str, Any] = {"failure": None}
        try:
            opened.write(results(lambda: fill(disk / "filler")))
        except SinkWriteError as error:
            told["failure"] = str(error)
        told["while_full"] = target.rows()
        free()
        again = target.sink("new")
        told["staged"] = again.resume_after()
        again.write(results(lambda: None))
        told["rows"] = len(target.rows())
        told["tables"] = target.tables()
        told["files"] = sorted(one.name for one in disk.iterdir())
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
