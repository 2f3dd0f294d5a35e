"""A process that writes results is killed at many moments; writing again ends with one row a key.

The processes are forked from a server that has imported everything, so that each costs little.
"""

import multiprocessing
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.tables import ended, generated, many, rows_of, sink, write_and_die
from tests.tables_database import Db

ROWS = 500
SINKS = "nightjar.pipeline.tables.sinks"
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.tables"])

# Before the first results are staged, between, and at each step of the last transaction.
SQL_POINTS = [
    f"{SINKS}.sql_staging:Staging.add:1",
    f"{SINKS}.sql_staging:Staging.add:4",
    f"{SINKS}.sql:set_up:before",
    f"{SINKS}.sql_merging:_upsert:after",
    f"{SINKS}.sql_staging:Staging.drop:after",
]
FILE_POINTS = [
    f"{SINKS}.batches:ResultBatches._piece:3",
    f"{SINKS}.swapping:_sync:before",
    f"{SINKS}.swapping:_swap:before",
    f"{SINKS}.swapping:_swap:after",
]


def killed(config: dict[str, Any], point: str, environment: dict[str, str] | None = None) -> None:
    process = PROCESSES.Process(target=write_and_die, args=(config, environment or {}, ROWS, point))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


EXPECTED = [
    (f"user-{i}", None if i % 10 == 9 else f"an answer of some words {i}") for i in range(ROWS)
]


@pytest.mark.parametrize("point", SQL_POINTS)
def test_a_table_has_the_old_rows_until_it_has_the_new_ones(
    database_url: str, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = Db(database_url)
    old = [("user-3", "old"), ("user-old", "old")]
    ended(db.sink(run="old"), *(generated(i, *row) for i, row in enumerate(old)))
    config = {"sql": {"url": "env:SINK_URL", "table": "answers", "mirror": True}}
    killed(config, point, db.environment)
    read = 'SELECT "user", text FROM answers ORDER BY "user"'
    assert db.rows(read) == old
    monkeypatch.setattr(f"{SINKS}.batches.MOST_ROWS", 100)
    again = db.sink(run="new", mirror=True)
    assert again.resume_after() == {"1": -1, "4": 299}.get(point.rpartition(":")[2], ROWS - 1)
    counts = again.write(many(ROWS))
    assert (counts.succeeded, counts.failed, counts.deleted) == (450, 50, 1)
    assert db.rows(read) == sorted(EXPECTED)
    assert db.tables() == {"answers", "nightjar_sinks"}
    db.engine.dispose()


@pytest.mark.parametrize("point", FILE_POINTS)
@pytest.mark.parametrize("target", ["out.jsonl", "out.parquet", "out/"])
def test_a_file_is_the_old_one_until_it_is_the_new_one(
    tmp_path: Path, target: str, point: str
) -> None:
    path = tmp_path / target
    config = {"jsonl" if "jsonl" in target else "parquet": f"{tmp_path}/{target}"}
    ended(sink(**config, run="old"), generated(0, "user-old", "old"))
    killed(config, point)

    def read() -> list[tuple[str, str | None]]:
        return [(one["user"], one["text"]) for one in rows_of(path)]

    assert read() == (EXPECTED if point.endswith(":after") else [("user-old", "old")])
    ended(sink(**config, run="new"), *many(ROWS))
    assert read() == EXPECTED
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
