"""Databases in trouble: locked, full, restarted, in a deadlock."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import StoreError, StoreUnavailableError
from nightjar.jobs.records import NewJob, NewRequest
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store, postgres
from nightjar.jobs.store.database import Database
from nightjar.jobs.workers import ComputeSeconds
from tests.jobs import submit


@pytest.fixture
def sqlite_store(sqlite_tables: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr("nightjar.jobs.store.database.BUSY_TIMEOUT_MS", 200)
    opened = Store(sqlite_tables)
    yield opened
    opened.close()


@pytest.fixture
def postgres_store(postgres_tables: str) -> Iterator[Store]:
    opened = Store(postgres_tables)
    yield opened
    opened.close()


def test_a_database_that_was_not_migrated_says_what_to_do(database_url: str) -> None:
    store = Store(database_url)
    try:
        with pytest.raises(StoreError, match=r"job.*run `nightjar migrate`"):
            store.ping()
        store.migrate()
        store.ping()
    finally:
        store.close()


def test_a_locked_file_is_reported_and_used_again(sqlite_store: Store, sqlite_url: str) -> None:
    path = sqlite_url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match="locked"):
            sqlite_store.heartbeats.beat("worker", ComputeSeconds())
        assert sqlite_store.jobs.newest() == []  # readers do not wait
        other.execute("COMMIT")
    sqlite_store.heartbeats.beat("worker", ComputeSeconds())


def test_a_new_file_that_somebody_writes_is_waited_for(sqlite_url: str) -> None:
    """As when several processes open it for the first time at once."""
    path = sa.make_url(sqlite_url).database
    assert path
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        releasing = threading.Timer(0.3, other.rollback)
        releasing.start()
        store = Store(sqlite_url)
        try:
            store.migrate()
        finally:
            store.close()
            releasing.join()
    with closing(sqlite3.connect(path)) as opened:
        assert opened.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_new_file_that_stays_locked_is_not_waited_for_for_ever(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightjar.jobs.store.database.BUSY_TIMEOUT_MS", 200)
    path = sa.make_url(sqlite_url).database
    assert path
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with closing(Store(sqlite_url)) as store, pytest.raises(StoreUnavailableError):
            store.ping()


def test_a_full_disk_is_reported_and_nothing_is_left(sqlite_store: Store) -> None:
    @event.listens_for(sqlite_store.database.engine, "begin")
    def no_room(connection: Connection) -> None:
        connection.exec_driver_sql("PRAGMA main.max_page_count = 40")

    rows = [
        NewRequest(index, index + 1, str(index), RequestKind.GENERATE, {"prompt": "x" * 2_000})
        for index in range(500)
    ]

    def submit_too_much() -> None:
        with sqlite_store.jobs.submit(NewJob("tiny")) as submission:
            submission.add(rows)

    with pytest.raises(StoreUnavailableError, match="full") as caught:
        submit_too_much()
    assert "xxx" not in str(caught.value)
    assert sqlite_store.jobs.newest() == []


def test_a_restarted_server_is_found_again(postgres_store: Store, postgres_server: str) -> None:
    job_id = submit(postgres_store, [{"prompt": "a"}])
    name = postgres_store.database.url.query["application_name"]
    admin = sa.create_engine(
        sa.make_url(postgres_server).set(drivername="postgresql+psycopg"), poolclass=sa.NullPool
    )
    with admin.connect() as connection:
        ended = connection.execute(
            sa.text(
                "SELECT pg_terminate_backend(pid, 20000) FROM pg_stat_activity "
                "WHERE application_name = :name"
            ),
            {"name": name},
        ).all()
    assert ended
    assert postgres_store.jobs.get(job_id).total == 1
    postgres_store.heartbeats.beat("worker", ComputeSeconds())


def test_a_deadlock_is_run_again(postgres_store: Store) -> None:
    """Two transactions lock two workers' rows in opposite orders, which the store never does."""
    for owner in ("ann", "bob"):
        postgres_store.heartbeats.beat(owner, ComputeSeconds())
    both_hold_one = threading.Barrier(2)
    attempts: list[str] = []

    def lock(first: str, second: str) -> None:
        def work(connection: Connection) -> None:
            attempts.append(first)
            statement = sa.text("UPDATE worker SET counter = counter + 1 WHERE owner = :owner")
            connection.execute(statement, {"owner": first})
            if len(attempts) <= 2:
                both_hold_one.wait(20)
            connection.execute(statement, {"owner": second})

        postgres_store.database.write(work)

    threads = [
        threading.Thread(target=lock, args=pair) for pair in (("ann", "bob"), ("bob", "ann"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(attempts) > 2  # the loser ran again
    with postgres_store.database.reading() as connection:
        counters = connection.scalars(sa.text("SELECT counter FROM worker")).all()
    assert counters == [3, 3]


def test_an_unreachable_server() -> None:
    store = Store("postgresql://nobody@127.0.0.1:1/nothing")
    with pytest.raises(StoreUnavailableError, match="not available"):
        store.jobs.newest()
    store.close()


def test_the_plan_of_a_small_table_is_dropped_when_it_has_grown(
    postgres_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = postgres_store.database
    look_up = sa.text("SELECT size FROM growing WHERE id = :id")
    seen = "SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'growing'"

    def new_scans() -> int:
        with database.reading() as connection:
            before = connection.exec_driver_sql(seen).scalar() or 0
            for id_ in range(20):
                connection.execute(look_up, {"id": id_}).all()
            connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
            return (connection.exec_driver_sql(seen).scalar() or 0) - before

    def run(statement: str) -> None:
        database.write(lambda connection: connection.exec_driver_sql(statement))

    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(postgres, "time", clock)
    database.engine.dispose()
    run("CREATE TABLE growing (id int PRIMARY KEY, size int) WITH (autovacuum_enabled = off)")
    try:
        run("INSERT INTO growing VALUES (1, 1)")
        run("ANALYZE growing")
        new_scans()
        run("INSERT INTO growing SELECT id, id FROM generate_series(2, 50000) AS id")
        assert new_scans() == 20  # by the plan that was made for one row
        clock.monotonic = lambda: postgres.TRUSTED_S
        assert new_scans() == 0
    finally:
        run("DROP TABLE growing")


def test_nothing_is_prepared_behind_a_pooler(
    postgres_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pooler tells its clients process numbers of its own."""
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", 1)
    for _ in range(20):
        postgres_store.backlog.jobs_to_plan()
    with postgres_store.database.reading() as connection:
        prepared = connection.exec_driver_sql("SELECT count(*) FROM pg_prepared_statements")
        assert prepared.scalar() == 0


def test_a_server_that_ends_before_an_upload_is_away(
    postgres_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is trusted still, and the limits of an upload are the first to be sent."""
    monkeypatch.setattr(postgres, "_says_something", lambda connection: False)
    with postgres_store.database.reading() as connection:
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
    with closing(
        psycopg.connect(str(postgres_store.database.url).replace("+psycopg", ""))
    ) as other:
        other.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
    with pytest.raises(StoreUnavailableError), postgres_store.database.uploading():
        pass


def test_a_statement_that_is_too_large_is_no_database_that_is_away(postgres_store: Store) -> None:
    too_large = sa.text("SELECT length(repeat('x', 1100000000))")
    with pytest.raises(StoreError, match="refused a statement") as raised:
        postgres_store.database.write(lambda connection: connection.scalar(too_large))
    assert not isinstance(raised.value, StoreUnavailableError)


def test_a_connection_in_use_is_closed_when_it_comes_back(database_url: str) -> None:
    """A thread may still read when the store is closed."""
    database = Database(database_url)
    with database.reading() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        database.close()
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1
    with pytest.raises((sqlite3.ProgrammingError, psycopg.OperationalError), match="closed"):
        driver.execute("SELECT 1")
