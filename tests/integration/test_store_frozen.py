"""A database behind a network that stands still: everybody who asks gets an end, in time."""

import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import sqlalchemy as sa

from nightjar.jobs.errors import StoreUnavailableError
from nightjar.jobs.store import Store, postgres
from nightjar.jobs.store.tables import job
from nightjar.jobs.workers import ComputeSeconds
from tests.freezing_proxy import FreezingProxy, proxied_postgres
from tests.jobs import submit

MOST_S = 12.0  # to try a connection, and to make another


@pytest.fixture
def behind(postgres_url: str) -> Iterator[tuple[FreezingProxy, str]]:
    with proxied_postgres(postgres_url) as opened:
        yield opened


@pytest.fixture
def proxy(behind: tuple[FreezingProxy, str]) -> FreezingProxy:
    return behind[0]


@pytest.fixture
def store(behind: tuple[FreezingProxy, str]) -> Iterator[Store]:
    """A store that reaches its database through the proxy, and has a connection."""
    opened = Store(behind[1])
    opened.migrate()
    opened.ping()
    yield opened
    opened.close()


def test_health_and_heartbeat_end_and_work_again_afterwards(
    store: Store, proxy: FreezingProxy
) -> None:
    asked = [store.ping, lambda: store.heartbeats.beat("worker", ComputeSeconds())]
    for ask in asked:
        ask()
    proxy.freeze()
    started = time.monotonic()
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask) for ask in asked]
        for answer in answers:
            with pytest.raises(StoreUnavailableError):
                answer.result()
    assert time.monotonic() - started < MOST_S
    proxy.thaw()
    for ask in asked:
        ask()


def test_it_ends_in_the_middle_of_a_transaction(
    store: Store, proxy: FreezingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "STATEMENT_LIMIT_S", 1.0)
    monkeypatch.setattr(postgres, "_MARGIN_S", 1.0)
    started = time.monotonic()

    def work(connection: sa.Connection) -> None:
        connection.execute(sa.text("SELECT 1"))
        proxy.freeze()
        connection.execute(sa.text("SELECT 2"))

    with pytest.raises(StoreUnavailableError, match="no answer for 2 s"):
        store.database.write(work)
    assert time.monotonic() - started < 4
    proxy.thaw()
    store.ping()


@pytest.mark.skipif(sys.platform != "linux", reason="the options have other names elsewhere")
def test_the_kernel_watches_each_connection(store: Store) -> None:
    """It notices a server that is gone for good, which sends nothing any more."""
    with store.database.reading() as connection:
        found = connection.connection.driver_connection
        assert found is not None
        with socket.fromfd(found.fileno(), socket.AF_INET, socket.SOCK_STREAM) as handle:
            assert handle.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            values = [
                handle.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in options
            ]
    assert values == [10, 5, 3, 20_000]


def settings_of(connection: sa.Connection) -> tuple[str, str]:
    return (
        str(connection.scalar(sa.text("SHOW statement_timeout"))),
        str(connection.scalar(sa.text("SHOW lock_timeout"))),
    )


def test_statements_have_limits_and_uploads_longer_ones(store: Store) -> None:
    with store.database.reading() as connection:
        assert settings_of(connection) == ("1min", "30s")
    with store.database.uploading() as connection:
        assert settings_of(connection)[0] == "30min"
    with store.database.reading() as connection:
        assert settings_of(connection) == ("1min", "30s")
    assert store.jobs.get(submit(store, [{"prompt": "a"}, {"prompt": "b"}])).total == 2


def test_the_server_ends_what_takes_too_long(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "STATEMENT_LIMIT_S", 0.2)
    store.database.engine.dispose()
    with pytest.raises(StoreUnavailableError, match="statement timeout"):
        store.database.write(lambda connection: connection.execute(sa.text("SELECT pg_sleep(9)")))


def test_the_locks_of_a_session_that_falls_silent_are_free_again(
    store: Store, proxy: FreezingProxy, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine may have lost its power: the server hears of no end, for hours by default."""
    monkeypatch.setattr(postgres, "_IDLE_LIMIT_S", 0.5)
    store.database.engine.dispose()
    job_id = submit(store, [{"prompt": "a"}])
    lock = sa.select(job.c.id).where(job.c.id == job_id).with_for_update()

    def fall_silent(connection: sa.Connection) -> None:
        connection.execute(lock)
        proxy.freeze()
        with closing(Store(postgres_url)) as other:
            other.database.write(lambda connection: connection.execute(lock))
        proxy.thaw()

    started = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="idle-in-transaction timeout"):
        store.database.write(fall_silent)
    assert time.monotonic() - started < 5
    store.ping()
