"""What keeps results from being written to a table is told before any work is done."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest
import sqlalchemy as sa

from nightjar.jobs.store import Store
from nightjar.pipeline.tables.keys import Keys
from nightjar.pipeline.tables.sinks.sink import SinkRefusedError
from tests.tables import ended, generated, sink
from tests.tables_database import Db, make_answers


@pytest.fixture
def db(database_url: str) -> Iterator[Db]:
    opened = Db(database_url)
    yield opened
    opened.engine.dispose()


def test_rows_of_others_are_not_mirrored_away(db: Db) -> None:
    make_answers(db)
    db.run("INSERT INTO answers (\"user\", text) VALUES ('mine', 'kept')")
    with pytest.raises(SinkRefusedError, match=r"would delete rows of the table answers"):
        db.sink(mirror=True).check()
    ended(db.sink(), generated(0, "a", "x"))  # upserting leaves them
    assert [row[0] for row in db.rows('SELECT "user" FROM answers ORDER BY 1')] == ["a", "mine"]
    # From now on the table is known as written by Nightjar.
    assert ended(db.sink(mirror=True, run="2"), generated(0, "a", "x")).deleted == 1


def test_every_wrong_column_is_named(db: Db) -> None:
    db.run(
        'CREATE TABLE answers ("user" TEXT PRIMARY KEY, text INTEGER, finish_reason TEXT NOT NULL,'
        " prompt_tokens TEXT, completion_tokens INTEGER, error_code VARCHAR(5),"
        " owner TEXT NOT NULL, error_message TEXT)"
    )
    with pytest.raises(SinkRefusedError) as caught:
        db.sink().check()
    said = str(caught.value)
    for name in ("text", "prompt_tokens", "error_code"):
        assert f"the column {name} is " in said
    for name in ("model", "error_param"):
        assert f"the column {name} (" in said
    assert "finish_reason should allow nulls" in said
    assert "owner gets no value" in said
    assert "completion_tokens" not in said
    assert "error_message" not in said


def test_a_table_without_the_key_is_refused(db: Db) -> None:
    make_answers(db, key="TEXT")
    with pytest.raises(SinkRefusedError, match=r"no primary key or unique constraint on exactly"):
        db.sink().check()
    db.run('CREATE UNIQUE INDEX one_each ON answers ("user")')
    ended(db.sink(), generated(0, "a", "x"))


def test_nightjars_own_tables_are_no_sinks(database_url: str) -> None:
    opened = Store(database_url)
    opened.migrate()
    opened.close()
    db = Db(database_url)
    for table in ("job", "request", "result"):
        with pytest.raises(SinkRefusedError, match="does not fit"):
            db.sink(table=table).check()
    db.engine.dispose()


def test_checking_leaves_nothing(db: Db) -> None:
    db.sink(mirror=True, errors="bad").check()
    assert db.tables() == set()


def test_missing_tables_and_views_are_refused(db: Db) -> None:
    with pytest.raises(SinkRefusedError, match="there is no table answers"):
        db.sink(create=False).check()
    db.run("CREATE VIEW answers AS SELECT 1 AS one")
    with pytest.raises(SinkRefusedError, match="view"):
        db.sink().check()


@contextmanager
def without_rights(db: Db) -> Iterator[Db]:
    """The database as it is for a user who may only read."""
    if db.is_sqlite:
        path = db.environment["SINK_URL"].removeprefix("sqlite:///")
        yield Db(f"sqlite:///file:{path}?mode=ro&uri=true")
        return
    name = f"reader_{uuid.uuid4().hex[:8]}"
    ((schema,),) = db.rows("SELECT current_schema()")
    db.run(
        f"CREATE ROLE {name} LOGIN",
        f"GRANT USAGE ON SCHEMA {schema} TO {name}",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {name}",
    )
    url = sa.make_url(db.environment["SINK_URL"]).update_query_dict(
        {"options": f"-csearch_path={schema} -crole={name}"}
    )
    try:
        yield Db(url.render_as_string(hide_password=False))
    finally:
        db.run(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def test_a_user_without_the_rights_is_told_before(db: Db) -> None:
    ended(db.sink(), generated(0, "a", "x"))
    with without_rights(db) as reader:
        with pytest.raises(SinkRefusedError, match=r"cannot be written: .*; check the"):
            reader.sink().check()
        reader.engine.dispose()


def test_sqlite_has_no_schemas_and_no_unsigned_integers(sqlite_url: str) -> None:
    db = Db(sqlite_url)
    with pytest.raises(SinkRefusedError, match="SQLite has no schemas"):
        db.sink(table="a.answers").check()
    with pytest.raises(SinkRefusedError, match="no unsigned integers of 64 bits"):
        db.sink(keys=Keys(pa.schema([("id", pa.uint64())]))).check()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("env:NOT_SET", "NOT_SET is not set"),
        ("postgresql://me:secret@host/db", "holds a password"),
        ("mysql://host/db", "is for mysql"),
        ("duckdb:///own.duckdb", "is for duckdb"),
        ("sqlite://", "in memory"),
        ("nonsense", "no database URL"),
        ("sqlite:////nowhere/at/all.db", "cannot be written"),
        ("postgresql://127.0.0.1:1/none", "cannot be written"),
    ],
)
def test_urls_that_cannot_be_used(url: str, said: str) -> None:
    with pytest.raises(SinkRefusedError, match=said) as caught:
        sink(sql={"url": url, "table": "t"}).check()
    assert "secret" not in str(caught.value)
