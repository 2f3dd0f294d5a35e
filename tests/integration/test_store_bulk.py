"""Many rows in one statement, over both databases; and what a commit that need not last keeps."""

import math
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from nightjar.jobs.errors import StoreError
from nightjar.jobs.records import NewResult
from nightjar.jobs.states import RequestState
from nightjar.jobs.store import Store
from nightjar.jobs.store.bulk import BulkInsert, BulkUpdate, driver_value
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.json_text import dump_json, load_json
from nightjar.jobs.store.tables import micro_batch, request, result, worker
from nightjar.jobs.workers import ComputeSeconds
from tests.jobs import planned, submit
from tests.outcomes import claim, compute

WORKER = ["owner", "counter", "seen_at", "engine_s", "load_s"]


@pytest.fixture
def database(store: Store, database_url: str) -> Iterator[Database]:
    """Another connection to the test's database, whose tables the store has made."""
    opened = Database(database_url)
    yield opened
    opened.close()


def worker_row(database: Database, owner: str, counter: int) -> tuple[Any, ...]:
    moment = driver_value(database, worker.c.seen_at, datetime(2026, 1, 2, tzinfo=UTC))
    return (owner, counter, moment, 0.5, 0.25)


def test_rows_are_read_back_as_they_were_given(database: Database) -> None:
    owners = ["plain", 'quote " and \\ slash', "한국어 🙂", "{braces},NULL"]
    insert = BulkInsert(database, worker, WORKER)
    rows = [worker_row(database, owner, 2**40 + n) for n, owner in enumerate(owners)]
    assert database.write(lambda connection: insert.run(connection, rows)) == 4
    with database.reading() as connection:
        found = connection.execute(sa.select(worker).order_by(worker.c.counter)).all()
    assert [row.owner for row in found] == owners
    assert found[3].counter == 2**40 + 3
    assert found[0].seen_at == datetime(2026, 1, 2, tzinfo=UTC)
    assert (found[0].engine_s, found[0].load_s) == (0.5, 0.25)


def test_what_is_there_already_stays_and_is_not_counted(database: Database) -> None:
    insert = BulkInsert(database, worker, WORKER, skips_known=True)
    first = [worker_row(database, "a", 1)]
    again = [worker_row(database, "a", 2), worker_row(database, "b", 2)]
    database.write(lambda connection: insert.run(connection, first))
    assert database.write(lambda connection: insert.run(connection, again)) == 1
    with database.reading() as connection:
        counters = dict(connection.execute(sa.select(worker.c.owner, worker.c.counter)).all())
    assert counters == {"a": 1, "b": 2}


def test_a_key_that_is_there_already_is_an_error(database: Database) -> None:
    insert = BulkInsert(database, worker, WORKER)
    rows = [worker_row(database, "a", 1)]
    database.write(lambda connection: insert.run(connection, rows))
    with pytest.raises(StoreError, match="refused the data"):
        database.write(lambda connection: insert.run(connection, rows))


def test_no_rows_need_no_statement(database: Database) -> None:
    insert = BulkInsert(database, worker, WORKER)
    update = BulkUpdate(database, request, ["state"])
    assert database.write(lambda connection: insert.run(connection, [])) == 0
    assert database.write(lambda connection: update.run(connection, [])) == 0


def test_an_update_finds_its_rows_by_their_ids(store: Store, database: Database) -> None:
    job_id = submit(store, [{"prompt": "a"}] * 3)
    ids = [item.id for item in store.backlog.queued_requests(job_id, 3)]
    update = BulkUpdate(database, request, ["prompt_vector", "segments"])
    rows: list[tuple[Any, ...]] = [("v@1", b"\x00\xff", ids[2]), (None, b"", ids[0])]
    unknown: list[tuple[Any, ...]] = [("v@1", b"", max(ids) + 1000)]
    assert database.write(lambda connection: update.run(connection, rows + unknown)) == 2
    columns = [request.c.prompt_vector, request.c.segments]
    with database.reading() as connection:
        found = connection.execute(sa.select(*columns).order_by(request.c.id)).all()
    assert [tuple(row) for row in found] == [(None, b""), (None, None), ("v@1", b"\x00\xff")]


def test_every_kind_of_outcome_lands_in_one_transaction(store: Store) -> None:
    job_id, (ref,) = planned(store, 3, each=3)
    claimed = claim(store, ref)
    first, second, third = claimed.requests
    outcomes = [
        NewResult(first.id, 200, {"text": '한국어 \n \\ " 🙂', "score": 0.5}, completion_tokens=2),
        NewResult.failure(second.id, "invalid_value", "it's \x00broken", param="body.n"),
        NewResult.failure(third.id, "internal_error", "no param", status=500),
    ]
    assert store.leases.finish(ref.id, 0, "worker", outcomes)
    records = store.results.read(job_id)
    assert records[0].body == {"text": '한국어 \n \\ " 🙂', "score": 0.5}
    assert [record.status_code for record in records] == [200, 400, 500]
    error = records[1].error
    assert error is not None
    assert (error.code, error.message, error.param) == (
        "invalid_value",
        "it's broken",
        "body.n",
    )
    assert store.jobs.get(job_id).completion_tokens == 2


def test_states_that_a_table_shows_are_the_plain_ones(store: Store, database: Database) -> None:
    """Bulk statements go past SQLAlchemy's types."""
    job_id, (first, _) = planned(store, 2)
    assert compute(store, first)
    with database.reading() as connection:
        raw = sa.text("SELECT state FROM request WHERE job_id = :job ORDER BY row_index")
        states = list(connection.scalars(raw, {"job": job_id}))
    assert states == [RequestState.DONE.value, RequestState.PLANNED.value]


def test_a_created_moment_is_read_back(store: Store, database: Database) -> None:
    before = datetime.now(UTC)
    _, (ref,) = planned(store, 1)
    assert compute(store, ref)
    with database.reading() as connection:
        landed = connection.execute(sa.select(result.c.created_at)).scalar_one()
    assert before <= landed <= datetime.now(UTC)


def test_a_commit_that_need_not_last_is_seen_by_everybody(database: Database) -> None:
    insert = BulkInsert(database, worker, WORKER)
    row = worker_row(database, "a", 1)
    database.write(lambda connection: insert.run(connection, [row]), durable=False)
    with database.reading() as connection:
        assert connection.scalar(sa.select(worker.c.counter)) == 1


def synchronous(database: Database, *, durable: bool) -> Any:
    """How a transaction of this kind waits for the disk."""
    setting = "PRAGMA synchronous" if database.is_sqlite else "SHOW synchronous_commit"
    return database.write(
        lambda connection: connection.exec_driver_sql(setting).scalar(), durable=durable
    )


def test_only_what_need_not_last_skips_the_disk(database: Database) -> None:
    lasting, not_lasting = (2, 1) if database.is_sqlite else ("on", "off")
    kinds = [True, False, False, True, False, True]  # on one pooled connection after the other
    found = [synchronous(database, durable=durable) for durable in kinds]
    assert found == [lasting if durable else not_lasting for durable in kinds]


def test_beats_and_claims_need_not_last_but_results_must(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[bool] = []
    write = Database.write

    def noting(self: Database, work: Any, *, durable: bool = True, **options: Any) -> Any:
        kinds.append(durable)
        return write(self, work, durable=durable, **options)

    _, (ref,) = planned(store, 1)
    monkeypatch.setattr(Database, "write", noting)
    store.heartbeats.beat("worker", ComputeSeconds())
    store.planning.mark_dispatched([ref])
    assert compute(store, ref)  # claim, finish
    assert kinds == [False, False, False, True]


def test_a_store_that_is_told_to_be_quick_stays_so(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'quick.db'}", synchronous="normal")
    assert [synchronous(database, durable=durable) for durable in (False, True)] == [1, 1]
    database.close()
    with sqlite3.connect(tmp_path / "quick.db") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), json_values, max_size=5))
def test_a_body_comes_back_from_its_json(body: dict[str, Any]) -> None:
    assert load_json(dump_json(body)) == body


@given(
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.lists(st.sampled_from(["object", "list", "tuple"]), max_size=4),
)
def test_a_number_that_is_not_finite_is_refused_wherever_it_stands(
    number: float, path: list[str]
) -> None:
    value: Any = number
    for step in path:
        value = {"object": {"a": 1, "x": value}, "list": ["a", value], "tuple": (value, None)}[step]
    with pytest.raises(StoreError, match="not finite"):
        dump_json({"prompt": "a", "value": value, "empty": {}})


def test_micro_batch_ids_are_told_to_their_members(store: Store, database: Database) -> None:
    _, refs = planned(store, 4, each=2)
    with database.reading() as connection:
        members = connection.scalars(sa.select(request.c.micro_batch_id).order_by(request.c.id))
        assert list(members) == [refs[0].id, refs[0].id, refs[1].id, refs[1].id]
        sizes = connection.scalars(sa.select(micro_batch.c.size))
        assert list(sizes) == [2, 2]


def test_what_is_too_large_for_a_statement_goes_in_several(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightjar.jobs.store.bulk.STATEMENT_BYTES", 100)
    insert = BulkInsert(database, worker, WORKER)
    rows = [worker_row(database, f"{n}" * 40, n) for n in range(1, 8)]
    statements: list[str] = []
    sa.event.listen(
        database.engine, "before_cursor_execute", lambda *given: statements.append(given[2])
    )
    assert database.write(lambda connection: insert.run(connection, rows)) == 7
    inserts = [statement for statement in statements if statement.startswith("INSERT")]
    assert len(inserts) == (1 if database.is_sqlite else 4)
    with database.reading() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(worker)) == 7
