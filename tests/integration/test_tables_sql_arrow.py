"""Queries of PostgreSQL as Arrow: the values, the errors and the limits of the cursor."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy.engine import make_url

from nightjar.pipeline.tables.sources.database_urls import source_database
from nightjar.pipeline.tables.sources.piece import SourceError
from nightjar.pipeline.tables.sources.sql import Query, SqlSource
from tests.databases import fresh_postgres_database

pytest.importorskip("adbc_driver_postgresql")

ROWS = 60_000
"""More than the driver and the connection hold at once."""


@pytest.fixture
def postgres(postgres_server: str) -> Iterator[str]:
    """A schema with a table whose `id` repeats, and is not in the order of the table."""
    with fresh_postgres_database(postgres_server) as url:
        run(
            url,
            "CREATE TABLE review (id int, part text, body text)",
            "INSERT INTO review SELECT n %% 1000, chr(97 + n / 1000), repeat('x', 300) "
            "FROM generate_series(%(last)s::int, 0, -1) n",
            last=ROWS - 1,
        )
        yield url


def run(url: str, *statements: str, **values: Any) -> list[Any]:
    """The rows of the last statement, which has the values."""
    place = make_url(url).set(drivername="postgresql")
    with psycopg.connect(
        place.render_as_string(hide_password=False), autocommit=True, application_name="test"
    ) as connection:
        for one in statements[:-1]:
            connection.execute(one.encode())
        found = connection.execute(statements[-1].encode(), values or None)
        return found.fetchall() if found.description else []


def source(url: str, query: str, *key: str, resume: bool = True, timeout_s: int = 60) -> SqlSource:
    """With `resume = false` the cursor reads."""
    database = source_database("env:SHOP", Path(), {"SHOP": url})
    return SqlSource(database, Query(query, key or ("id",), timeout_s, resume))


def read(found: SqlSource) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for piece in found.batches(found.schema.names):
        assert piece.rows.num_rows <= 1_000
        rows += piece.rows.to_pylist()
    return rows


def running(url: str) -> list[str]:
    """The statements that this test's sources are at."""
    query = """SELECT query FROM pg_stat_activity
        WHERE application_name = %(name)s AND state <> 'idle'"""
    return [row[0] for row in run(url, query, name=name_of(url))]


def name_of(url: str) -> str:
    """As what this test's sources are known to the server."""
    return str(make_url(url).query["application_name"])


EXACT = """SELECT n AS id, n::smallint AS a, n::bigint * 4000000000 AS b, n / 3.0::float8 AS c,
    n % 2 = 0 AS d, 'k' || n AS e, n::varchar(9) AS f, 'ab'::char(4) AS g, '\\x00ff'::bytea AS h,
    '2026-11-24'::date + n AS i, '2026-11-24 01:02:03.456789'::timestamp AS j,
    '0001-01-02 00:00+00'::timestamptz AS k, '9999-12-30'::date AS l, null::int AS m,
    nullif(n, 3) AS n, '한국어 10%' AS o, 'NaN'::float8::text AS p
    FROM generate_series(1, 5) n -- all of them"""


def test_values_are_those_of_the_cursor(postgres: str) -> None:
    whole, cursor = source(postgres, EXACT), source(postgres, EXACT, resume=False)
    assert whole.schema == cursor.schema
    assert read(whole) == read(cursor)


def test_rows_come_as_arrow(postgres: str) -> None:
    pieces = source(postgres, "SELECT * FROM review").batches(["id", "part"])
    assert next(pieces).rows.schema.names == ["id", "part"]
    (statement,) = running(postgres)
    assert statement.startswith("COPY")
    pieces.close()


@pytest.mark.parametrize(
    "value",
    [
        "1.1::real",
        "1.50::numeric(5,2)",
        """'{"k": [1.50]}'::jsonb""",
        "'00000000-0000-0000-0000-000000000001'::uuid",
        "array[1, 2]",
        "array['p', 'q']",
        "'10.0.0.1'::inet",
        "'1 day'::interval",
        "'b'::mood",
        "7::oid",
        "'1'::bit(1)",
    ],
)
def test_other_types_are_read_by_the_cursor(postgres: str, value: str) -> None:
    run(postgres, "CREATE TYPE mood AS ENUM ('a', 'b')")
    query = f"SELECT 1 AS id, {value} AS value"
    (row,) = read(source(postgres, query))
    assert [row] == read(source(postgres, query, resume=False))
    assert row["value"] is not None


@pytest.mark.parametrize(
    "value",
    [
        "CASE id WHEN 999 THEN 'infinity' ELSE '2026-11-24' END::date",
        "CASE id WHEN 999 THEN '-infinity' ELSE '2026-11-24' END::timestamp",
        "CASE id WHEN 999 THEN '20000-01-01' ELSE '2026-11-24' END::timestamptz",
        "1 / (id - 999)",
        "setval('steps', id + 1)",
    ],
)
def test_errors_are_those_of_the_cursor(postgres: str, value: str) -> None:
    run(postgres, "CREATE SEQUENCE steps")
    query = " ".join(["SELECT id,", value, "AS value FROM review"])
    said = []
    for resume in (True, False):
        with pytest.raises(SourceError) as raised:
            read(source(postgres, query, resume=resume))
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert run(postgres, "SELECT last_value FROM steps") == [(1,)]


@pytest.mark.parametrize("key", [("part", "id"), ("id",)])
def test_the_cursor_goes_on_behind_the_key_after_a_lost_connection(
    postgres: str, key: tuple[str, ...]
) -> None:
    """Where `id` is the whole key, 60 rows have each; these come in any order."""
    pieces = source(postgres, "SELECT part, id, body FROM review", *key).batches(["part", "id"])
    rows = next(pieces).rows.to_pylist()
    killed = run(
        postgres,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = %(name)s AND starts_with(query, 'COPY')",
        name=name_of(postgres),
    )
    assert killed == [(True,)]
    after = next(pieces)
    for piece in (after, *pieces):
        rows += piece.rows.to_pylist()
    assert len(rows) == ROWS
    found = sorted(tuple(row[name] for name in key) for row in rows)
    whole = [{"part": chr(97 + n // 1000), "id": n % 1000} for n in range(ROWS)]
    assert found == sorted(tuple(row[name] for name in key) for row in whole)


ENDLESS = "WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) SELECT id FROM n"


def test_a_query_that_never_ends(postgres: str) -> None:
    with pytest.raises(SourceError, match="has not ended after timeout_s = 2"):
        read(source(postgres, ENDLESS, timeout_s=2))
    assert running(postgres) == []


def test_reading_that_is_given_up_ends_the_query(postgres: str) -> None:
    query = "SELECT * FROM review, generate_series(1, 1000) n ORDER BY id"
    run(postgres, "CREATE INDEX ON review (id)")
    began = time.monotonic()
    pieces = source(postgres, query).batches(["id"])
    next(pieces)
    pieces.close()
    assert running(postgres) == []
    assert time.monotonic() - began < 60
