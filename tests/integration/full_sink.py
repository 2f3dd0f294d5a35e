"""A sink on a disk of its own that is too small, told as JSON on standard output.

    python -m tests.integration.full_sink DISK KIND

`command` mounts the disk at DISK, which nobody else sees.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nightjar.jobs.records import ResultRecord
from nightjar.pipeline.tables.databases import database_url, open_database
from nightjar.pipeline.tables.sinks.sink import SinkWriteError
from tests.acceptance.full_disk import fill
from tests.tables import generated, many, rows_of, sink

DISK_BYTES = 64 << 20
TARGETS: dict[str, dict[str, Any]] = {
    "jsonl": {"jsonl": "{disk}/out.jsonl"},
    "parquet": {"parquet": "{disk}/out.parquet"},
    "folder": {"parquet": "{disk}/out/"},
    "sqlite": {"sql": {"url": "sqlite:///{disk}/own.db", "table": "answers"}},
}


def command(disk: Path, kind: str) -> list[str]:
    """The command line that runs this file with a small disk mounted at `disk`."""
    mount = 'mount -t tmpfs -o size="$0" tmpfs "$1" && shift && exec "$@"'
    inside = [sys.executable, "-m", __name__, str(disk), kind]
    outside = ["unshare", "--user", "--map-root-user", "--mount"]
    return [*outside, "sh", "-c", mount, str(DISK_BYTES), str(disk), *inside]


def main(disk: Path, kind: str) -> None:
    config = json.loads(json.dumps(TARGETS[kind]).replace("{disk}", str(disk)))
    path = disk / {"jsonl": "out.jsonl", "parquet": "out.parquet"}.get(kind, "out")

    def read() -> list[list[Any]]:
        if kind != "sqlite":
            return [[one["user"], one["text"]] for one in rows_of(path)]
        engine = open_database(database_url(config["sql"]["url"], {}))
        with engine.begin() as connection:
            found = connection.exec_driver_sql('SELECT "user", text FROM answers')
            return [list(row) for row in found]

    def until_full() -> Iterator[ResultRecord]:
        yield from many(1_000)
        fill(disk / "filler")
        yield from many(60_000, text="x" * 1_000)  # in row order from here, whatever their numbers

    sink(**config, run="old").write([generated(0, "a", "old")])
    opened = sink(**config, run="new")
    opened.check()
    told: dict[str, Any] = {"failure": None}
    try:
        opened.write(until_full())
    except SinkWriteError as error:
        told["failure"] = str(error)
    told["while_full"] = read()
    (disk / "filler").unlink()
    sink(**config, run="newer").write([generated(0, "a", "new")])
    told["after"] = read()
    told["left"] = sorted(one.name for one in disk.iterdir())
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
