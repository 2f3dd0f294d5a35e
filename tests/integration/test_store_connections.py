"""A store of few connections to PostgreSQL: no more are opened, and signs of life never wait."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from nightjar.jobs.errors import StoreUnavailableError
from nightjar.jobs.store import Store, database
from nightjar.jobs.store.tables import job
from nightjar.jobs.workers import ComputeSeconds
from tests.jobs import planned
from tests.postgres_schemas import administering
from tests.processes import wait_until

OPEN = sa.text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :name")
LOCKED = sa.text("SELECT 1 FROM job WHERE id = :id FOR UPDATE")
WAITING = sa.text(
    "SELECT count(*) FROM pg_stat_activity "
    "WHERE application_name = :name AND wait_event_type = 'Lock'"
)


@pytest.fixture
def name(postgres_tables: str) -> str:
    return str(make_url(postgres_tables).query["application_name"])


@pytest.fixture
def few(postgres_tables: str) -> Iterator[Store]:
    with closing(Store(postgres_tables, connections=2)) as store:
        yield store


@contextmanager
def locked_job(url: str, job_id: str) -> Iterator[None]:
    """Another session that holds the lock of a job's row."""
    other = make_url(url).update_query_dict({"application_name": "other"})
    with sa.create_engine(other, poolclass=sa.NullPool).begin() as connection:
        connection.execute(LOCKED, {"id": job_id})
        yield


def test_signs_of_life_do_not_wait_behind_results(
    few: Store, postgres_server: str, postgres_tables: str, name: str
) -> None:
    job_id, refs = planned(few, 4, each=1)
    with (
        ThreadPoolExecutor(4) as threads,
        administering(postgres_server) as admin,
        locked_job(postgres_tables, job_id),
    ):
        touch = sa.update(job).where(job.c.id == job_id).values(failed=0)

        def write() -> None:
            few.database.write(lambda connection: connection.execute(touch))

        blocked = [threads.submit(write) for _ in refs]
        wait_until("a blocked write", lambda: admin.scalar(WAITING, {"name": name}) == 1)
        few.heartbeats.beat("worker", ComputeSeconds(1.0, 2.0))
        few.ping()
        assert admin.scalar(OPEN, {"name": name}) == 2
        assert not any(one.done() for one in blocked)
    assert [one.exception(30) for one in blocked] == [None] * len(blocked)
    assert few.heartbeats.compute_seconds() == ComputeSeconds(1.0, 2.0)


def test_who_gets_no_connection_in_time_is_told(
    few: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "CONNECTION_WAIT_S", 0.05)
    with (
        few.database.reading(),
        ThreadPoolExecutor(1) as thread,
        pytest.raises(StoreUnavailableError, match="every database connection is in use"),
    ):
        thread.submit(few.jobs.get, "job_0").result(30)


def test_sqlite_has_no_such_limit(sqlite_tables: str) -> None:
    with (
        closing(Store(sqlite_tables, connections=2)) as store,
        store.database.reading(),
        store.database.reading(),
        store.database.reading() as third,
    ):
        assert third.scalar(sa.text("SELECT count(*) FROM job")) == 0
