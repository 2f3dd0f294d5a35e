"""Results in a table of the user's database: SQLite and PostgreSQL."""

import datetime as dt
import json
import uuid
from collections.abc import Iterator, Sequence
from decimal import Decimal

import pyarrow as pa
import pytest
import sqlalchemy as sa

from nightjar.jobs.records import ResultRecord
from nightjar.pipeline.tables.keys import Keys
from nightjar.pipeline.tables.sinks.sink import (
    SinkCounts,
    SinkRefusedError,
    SinkWriteError,
)
from tests.tables import ended, failed, generated, many, ranked
from tests.tables_database import Db, make_answers


@pytest.fixture
def db(database_url: str) -> Iterator[Db]:
    opened = Db(database_url)
    yield opened
    opened.engine.dispose()


ANSWERS = 'SELECT "user", text, error_code FROM answers ORDER BY 1'


def test_a_table_is_made_and_upserted(db: Db) -> None:
    assert ended(db.sink(), generated(0, "a", "one"), failed(1, "b")) == SinkCounts(1, 1)
    assert db.rows(ANSWERS) == [("a", "one", None), ("b", None, "context_exceeded")]
    again = generated(0, "b", "two"), generated(1, "c", "three")
    assert ended(db.sink(run="run-2"), *again) == SinkCounts(2, 0)
    assert db.rows(ANSWERS) == [("a", "one", None), ("b", "two", None), ("c", "three", None)]
    assert db.tables() == {"answers", "nightjar_sinks"}
    with db.engine.begin() as connection:
        found = sa.inspect(connection)
        assert found.get_pk_constraint("answers")["constrained_columns"] == ["user"]
        types = {one["name"]: one["type"] for one in found.get_columns("answers")}
    assert isinstance(types["prompt_tokens"], sa.BigInteger if not db.is_sqlite else sa.Integer)


def test_rows_that_stay_are_not_written_again(db: Db) -> None:
    ended(db.sink(), generated(0, "a", "one"), generated(1, "b", "two"))
    db.run(
        "CREATE TABLE seen (who TEXT)",
        *(
            [
                "CREATE TRIGGER t AFTER UPDATE ON answers BEGIN INSERT INTO seen VALUES"
                " (new.user); END"
            ]
            if db.is_sqlite
            else [
                "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO"
                " seen VALUES (new.user); RETURN new; END $$",
                "CREATE TRIGGER t AFTER UPDATE ON answers FOR EACH ROW EXECUTE FUNCTION note()",
            ]
        ),
    )
    ended(db.sink(run="run-2"), generated(0, "a", "one"), generated(1, "b", "new"))
    assert db.rows("SELECT who FROM seen") == [("b",)]


def test_lists_are_arrays_or_json(db: Db) -> None:
    answers = ranked(0, "a", [2.0, None, 1.0], top_n=2), failed(1, "b")
    ended(db.sink("rank"), *answers)
    (first, second) = db.rows('SELECT scores, ranking FROM answers ORDER BY "user"')
    scores, ranking = map(json.loads, first) if db.is_sqlite else first
    assert ranking == [2, 0]
    assert scores == [pytest.approx(0.1353, abs=1e-4), None, pytest.approx(0.3679, abs=1e-4)]
    assert second == (None, None)
    texts = generated(0, "a", 'say "x"', "{b, c}\\")
    ended(db.sink(n=2, table="several"), texts)
    ((found,),) = db.rows("SELECT text FROM several")
    assert (json.loads(found) if db.is_sqlite else found) == ['say "x"', "{b, c}\\"]


def test_keys_have_columns_of_their_types(db: Db) -> None:
    moment = dt.datetime(2026, 11, 24, 2, 30, 0, 5, tzinfo=dt.UTC)
    columns = {
        "day": pa.array([dt.date(2026, 11, 24)]),
        "number": pa.array([2**63 - 1]),
        "small": pa.array([-7], pa.int8()),
        "yes": pa.array([True]),
        "at": pa.array([moment], pa.timestamp("ns", "Asia/Seoul")),
        "local": pa.array([moment.replace(tzinfo=None)], pa.timestamp("us")),
        "price": pa.array([Decimal("1.50")], pa.decimal128(8, 2)),
        "raw": pa.array([b"\x00\xff"]),
        "name": pa.array(["a'b\t\\N"]),
    }
    batch = pa.record_batch(columns)
    keys = Keys(batch.schema)
    (id_,) = keys.encode(batch)
    for run in ("run-1", "run-2"):  # the second finds the table that the first has made
        ended(db.sink(keys=keys, run=run), generated(0, id_, run))
    names = ", ".join(keys.names)
    (found,) = db.rows(f"SELECT {names}, text FROM answers")  # noqa: S608
    if db.is_sqlite:
        day, at = "2026-11-24", "2026-11-24 02:30:00.000005"
        assert found == (
            day,
            2**63 - 1,
            -7,
            1,
            f"{at}000Z",
            at,
            "1.50",
            b"\x00\xff",
            "a'b\t\\N",
            "run-2",
        )
    else:
        expected = [one[0].as_py() for one in batch.columns[:4]]
        assert [*found[:4]] == expected
        assert found[4:] == (
            moment,
            moment.replace(tzinfo=None),
            Decimal("1.50"),
            b"\x00\xff",
            "a'b\t\\N",
            "run-2",
        )


def test_failures_in_a_table_of_their_own(db: Db) -> None:
    """A key is in one of the two tables."""
    ended(db.sink(errors="bad"), generated(0, "a", "one"), failed(1, "b"), failed(2, "c"))
    assert db.rows('SELECT "user", text FROM answers') == [("a", "one")]
    assert db.rows('SELECT "user", error_code FROM bad ORDER BY 1') == [
        ("b", "context_exceeded"),
        ("c", "context_exceeded"),
    ]
    counts = ended(db.sink(errors="bad", run="2"), failed(0, "a"), generated(1, "b", "now"))
    assert counts == SinkCounts(1, 1)
    assert db.rows('SELECT "user", text FROM answers') == [("b", "now")]
    assert db.rows('SELECT "user" FROM bad ORDER BY 1') == [("a",), ("c",)]


@pytest.mark.parametrize("errors", ["same", "bad"])
def test_rows_that_are_gone_leave_a_mirrored_table(db: Db, errors: str) -> None:
    options = {"mirror": True, "errors": errors}
    rows = [generated(0, "a", "x"), generated(1, "b", "x"), failed(2, "c"), failed(3, "d")]
    ended(db.sink(**options), *rows)
    counts = ended(db.sink(**options, run="2"), generated(0, "b", "y"), failed(1, "d"))
    assert counts == SinkCounts(1, 1, deleted=2)
    found = db.rows('SELECT "user", text FROM answers ORDER BY 1')
    assert found == [("b", "y"), *([("d", None)] if errors == "same" else [])]
    if errors == "bad":
        assert db.rows('SELECT "user" FROM bad') == [("d",)]


def test_a_table_of_the_users_is_used(db: Db) -> None:
    """With columns of its own, and keys of a type that Arrow lacks."""
    make_answers(
        db,
        ", note TEXT, at TIMESTAMP DEFAULT CURRENT_TIMESTAMP NOT NULL",
        key=("TEXT PRIMARY KEY" if db.is_sqlite else "UUID PRIMARY KEY"),
    )
    ids = [str(uuid.UUID(int=number)) for number in (1, 2)]
    ended(db.sink(create=False), generated(0, ids[0], "x"), generated(1, ids[1], "y"))
    db.run("UPDATE answers SET note = 'read'")
    ended(db.sink(create=False, run="2"), generated(0, ids[0], "z"))
    found = db.rows('SELECT CAST("user" AS TEXT), text, note FROM answers ORDER BY 1')
    assert found == [(ids[0], "z", "read"), (ids[1], "y", "read")]


def test_a_refused_write_changes_nothing(db: Db) -> None:
    """The database refuses one row in the last step."""
    ended(db.sink(), generated(0, "a", "old"))
    db.run(
        "CREATE UNIQUE INDEX no_two ON answers (text)",
    )
    with pytest.raises(SinkWriteError, match=r"its rows are as they were.*run this again"):
        db.sink(run="2").write([generated(0, "a", "same"), generated(1, "b", "same")])
    assert db.rows(ANSWERS) == [("a", "old", None)]
    db.run("DROP INDEX no_two")
    assert db.sink(run="2").resume_after() == 1
    assert db.sink(run="2").write([]) == SinkCounts(2, 0)
    assert db.rows(ANSWERS) == [("a", "same", None), ("b", "same", None)]
    assert db.tables() == {"answers", "nightjar_sinks"}


class Killed(BaseException):
    """Like a signal."""


def until(rows: Sequence[ResultRecord], count: int) -> Iterator[ResultRecord]:
    yield from rows[:count]
    raise Killed


def test_a_broken_write_is_continued_and_an_older_one_forgotten(
    db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightjar.pipeline.tables.sinks.batches.MOST_ROWS", 10)
    rows = list(many(100))
    for run in ("older", "run-1"):
        with pytest.raises(Killed):
            db.sink(run=run).write(until(rows, 55))
    assert db.tables() == {name for name in db.tables() if name.startswith("nightjar_staged_")}
    assert len(db.tables()) == 1
    assert db.sink(run="older").resume_after() == -1
    assert db.sink().resume_after() == 49
    assert db.sink().write(rows[50:]) == SinkCounts(90, 10)
    assert db.rows("SELECT count(*) FROM answers") == [(100,)]
    # And so does one that is given all of them again.
    with pytest.raises(Killed):
        db.sink(run="run-2").write(until(rows, 55))
    assert db.sink(run="run-2").write(rows) == SinkCounts(90, 10)
    assert db.rows("SELECT count(*) FROM answers") == [(100,)]


def test_two_runs_do_not_write_at_once(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightjar.pipeline.tables.sinks.sql._LOCK_S", 0.1)

    def within() -> Iterator[ResultRecord]:
        with pytest.raises(SinkWriteError, match="another run writes"):
            db.sink(run="run-2").write([])
        yield generated(0, "a", "x")

    assert db.sink().write(within()) == SinkCounts(1, 0)
    assert db.sink(run="run-2").write([]) == SinkCounts(0, 0)


def test_postgres_has_schemas_and_no_nul(postgres_url: str) -> None:
    db = Db(postgres_url)
    ((schema,),) = db.rows("SELECT current_schema()")
    ended(db.sink(table=f"{schema}.answers"), generated(0, "a", "nul \x00 here"))
    assert db.rows(ANSWERS) == [("a", "nul \ufffd here", None)]
    with pytest.raises(SinkRefusedError, match="cannot be written"):
        db.sink(table="nowhere.answers").check()
    db.engine.dispose()
