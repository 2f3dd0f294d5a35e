"""Queries as sources: SQLite and PostgreSQL, read-only, in time, and after a lost connection."""

import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from sqlalchemy.engine import make_url

from nightjar.pipeline.tables.sources import sql
from nightjar.pipeline.tables.sources.database_urls import source_database
from nightjar.pipeline.tables.sources.piece import SourceError, SourceLostError
from nightjar.pipeline.tables.sources.sql import Query, SqlSource
from tests.databases import fresh_postgres_database

ROWS = 3_000


@pytest.fixture(autouse=True)
def without_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cursor reads PostgreSQL; test_tables_sql_arrow.py has the other way."""
    monkeypatch.setitem(sys.modules, "adbc_driver_postgresql", None)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A SQLite file with some rows."""
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE review (id INTEGER, text TEXT, stars REAL)")
        rows = [(n, f"text {n}", n / 2 if n else None) for n in range(ROWS)]
        connection.executemany("INSERT INTO review VALUES (?, ?, ?)", rows)
        connection.commit()
    return tmp_path


@pytest.fixture
def postgres(postgres_server: str) -> Iterator[str]:
    """A schema with some rows; the keys are not in the order of the table."""
    with fresh_postgres_database(postgres_server) as url:
        with psycopg.connect(plain(url)) as connection:
            connection.execute("CREATE TABLE review (id int, part text, body text)")
            connection.execute(
                "INSERT INTO review SELECT n %% 1000, chr(97 + n / 1000), repeat('x', n %% 50) "
                "FROM generate_series(%s::int, 0, -1) n",
                [ROWS - 1],
            )
        yield url


def plain(url: str) -> str:
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def source(
    folder: Path,
    query: str,
    url: str = "sqlite:///shop.db",
    key: tuple[str, ...] = ("id",),
    **how: Any,
) -> SqlSource:
    asked = {"timeout_s": 30, "resume": True} | how
    database = source_database("env:SHOP", folder, {"SHOP": url})
    return SqlSource(database, Query(query, key, **asked))


def read(found: SqlSource, *columns: str) -> list[tuple[Any, ...]]:
    pieces = [one.rows for one in found.batches(columns or found.schema.names)]
    assert max((one.num_rows for one in pieces), default=0) <= 1_000
    return [tuple(row.values()) for one in pieces for row in one.to_pylist()]


def test_a_query_of_sqlite(shop: Path) -> None:
    found = source(shop, "SELECT * FROM review WHERE text LIKE '%1%' -- of 100%")
    assert found.schema == pa.schema({"id": pa.int64(), "text": pa.string(), "stars": pa.float64()})
    rows = read(found, "stars", "id")
    assert rows == [(n / 2, n) for n in range(ROWS) if "1" in str(n)]
    assert not found.is_fixed
    assert source(shop, "SELECT 1 AS id").digest() != found.digest()
    assert read(source(shop, "SELECT * FROM review WHERE id < 0")) == []


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM review",
        "INSERT INTO review VALUES (1, 'x', 2) RETURNING id",
        "CREATE TABLE other (id INTEGER)",
        "PRAGMA user_version = 7",
    ],
)
def test_a_query_of_sqlite_that_writes(shop: Path, query: str) -> None:
    with pytest.raises(SourceError, match=r"the query writes.*give one SELECT"):
        read(source(shop, query))
    with closing(sqlite3.connect(shop / "shop.db")) as connection:
        assert connection.execute("SELECT count(*) FROM review").fetchone() == (ROWS,)
        assert connection.execute("PRAGMA user_version").fetchone() == (0,)


ENDLESS = "WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) SELECT {} FROM n"


def test_a_query_that_never_ends(shop: Path) -> None:
    began = time.monotonic()
    with pytest.raises(SourceError, match="has not ended after timeout_s = 1"):
        source(shop, ENDLESS.format("count(*) AS id"), timeout_s=1)
    with pytest.raises(SourceError, match="has not ended after timeout_s = 2"):
        read(source(shop, ENDLESS.format("id"), timeout_s=2))
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT nix FROM review", "the query fails: no such column"),
        ("SELECT 1; DELETE FROM review", "the query fails: .*one statement"),
        ("SELECT id, id FROM review", "two columns 'id'.*AS"),
        ("", "give one SELECT"),
    ],
)
def test_queries_that_cannot_be_read(shop: Path, query: str, said: str) -> None:
    with pytest.raises(SourceError, match=said):
        source(shop, query)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("env:NOBODY", "NOBODY is not set"),
        ("postgresql://owl:s3cret@host/shop", "env:NAME"),
        ("mysql://host/shop", "is for mysql; .*use Parquet files"),
        ("mysql+pymysql://owl@host/shop", "is for mysql; .*use Parquet files"),
        ("mariadb+mariadbconnector://owl@host/shop", "is for mariadb; .*use Parquet files"),
        ("duckdb:///shop.duckdb", "is for duckdb; .*use Parquet files"),
        ("sqlite:///none.db", "there is no such file"),
    ],
)
def test_urls_that_cannot_be_used(tmp_path: Path, url: str, said: str) -> None:
    with pytest.raises(SourceError, match=said) as raised:
        source_database(url, tmp_path, {})
    assert "s3cret" not in str(raised.value)


def test_types_of_postgresql(postgres: str, tmp_path: Path) -> None:
    query = """SELECT 1::smallint AS a, true AS b, 1.5::real AS c, 'x'::varchar(3) AS d,
        '2026-11-24'::date AS e, '2026-11-24 01:02'::timestamptz AS f, 1.50::numeric(5,2) AS g,
        '{"k": [1]}'::jsonb AS h, array['p', 'q'] AS i, null::int AS j,
        '00000000-0000-0000-0000-000000000001'::uuid AS k, '10%'::text AS l;"""
    found = source(tmp_path, query, postgres, key=("a",))
    assert found.schema.field("f").type == pa.timestamp("us", "UTC")
    (row,) = read(found)
    values = dict(zip(found.schema.names, row, strict=True))
    assert (values["a"], values["b"], values["c"], values["d"]) == (1, True, 1.5, "x")
    assert (str(values["e"]), values["g"], values["h"]) == ("2026-11-24", "1.50", '{"k": [1]}')
    assert (values["i"], values["j"], values["l"]) == (["p", "q"], None, "10%")
    assert values["k"].endswith("01")


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM review",
        "WITH gone AS (DELETE FROM review RETURNING id) SELECT * FROM gone",
        "SELECT id, setval('steps', 5) FROM review",
        "SELECT 1 AS id; COMMIT; DELETE FROM review",
    ],
)
def test_a_query_of_postgresql_that_writes(postgres: str, tmp_path: Path, query: str) -> None:
    with psycopg.connect(plain(postgres)) as connection:
        connection.execute("CREATE SEQUENCE steps")
    for resume in (True, False):
        with pytest.raises(SourceError, match="one SELECT"):
            read(source(tmp_path, query, postgres, resume=resume))
    with psycopg.connect(plain(postgres)) as connection:
        count = connection.execute("SELECT count(*) FROM review").fetchone()
        steps = connection.execute("SELECT last_value FROM steps").fetchone()
    assert (count, steps) == ((ROWS,), (1,))


def test_a_query_of_postgresql_that_never_ends(postgres: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="has not ended after timeout_s = 1"):
        read(source(tmp_path, "SELECT pg_sleep(30)::text AS id", postgres, timeout_s=1))
    query = ENDLESS.format("id")
    with pytest.raises(SourceError, match="has not ended after timeout_s = 1"):
        read(source(tmp_path, query, postgres, timeout_s=1, resume=False))


def end_connections(url: str) -> None:
    """End every connection of this test's sources, as a restart of the server does."""
    with psycopg.connect(plain(url), autocommit=True, application_name="killer") as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
            [make_url(url).query["application_name"]],
        )


@pytest.mark.parametrize("key", [("part", "id"), ("id",)])
def test_reading_goes_on_behind_the_key_after_a_lost_connection(
    postgres: str, tmp_path: Path, key: tuple[str, ...]
) -> None:
    """Keys repeat where `id` is the whole key, and are read as often as they are there."""
    with psycopg.connect(plain(postgres)) as connection:
        connection.execute(
            "INSERT INTO review VALUES (null, 'a', 'n'), (5, null, 'm'), (5, null, 'm')"
        )
    found = source(tmp_path, "SELECT part, id FROM review -- all", postgres, key=key)
    rows: list[tuple[Any, ...]] = []
    lost = 0
    for piece in found.batches(key):
        rows += [tuple(row.values()) for row in piece.rows.to_pylist()]
        if lost < 3 and len(rows) > 700 * (lost + 1):
            end_connections(postgres)
            lost += 1
    assert lost == 3
    whole = [(chr(97 + n // 1000), n % 1000) for n in range(ROWS)]
    whole += [("a", None), (None, 5), (None, 5)]
    expected = [row if len(key) > 1 else row[1:] for row in whole]
    assert sorted(rows, key=str) == sorted(expected, key=str)


def test_without_an_order_a_lost_connection_says_why(postgres: str, tmp_path: Path) -> None:
    found = source(tmp_path, "SELECT * FROM review", postgres, resume=False)
    pieces = found.batches(["id"])
    next(pieces)
    end_connections(postgres)
    with pytest.raises(SourceLostError, match=r"lost after \d+ rows .*`resume = false`"):
        list(pieces)


def test_a_server_that_stays_away(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "_RETRIES_S", (0.01, 0.01))
    place = tmp_path / "server"  # of its socket
    url = make_url(postgres)
    place.symlink_to(str(url.query["host"]))
    linked = url.update_query_dict({"host": str(place)})
    database = source_database(linked.render_as_string(hide_password=False), tmp_path, {})
    query = Query("SELECT * FROM review", ("id",), timeout_s=30, resume=True)
    pieces = SqlSource(database, query).batches(["id"])
    next(pieces)
    place.unlink()
    end_connections(postgres)
    with pytest.raises(SourceLostError, match=r"lost after \d+ rows .* could not be made again"):
        list(pieces)


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    url = "postgresql://owl:s3cret@127.0.0.1:1/shop"
    with pytest.raises(SourceLostError, match="cannot be reached") as raised:
        source(tmp_path, "SELECT 1 AS id", url)
    assert "s3cret" not in str(raised.value)
