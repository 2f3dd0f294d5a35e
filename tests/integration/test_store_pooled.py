"""A store behind a pooler that lends another session to each transaction.

The server tells a client which process answers. Here that answer is taken for a pooler's;
test_pooler.py has a real one.
"""

from collections.abc import Iterator
from contextlib import closing

import pytest
import sqlalchemy as sa

from nightjar.jobs.errors import NoSessionError
from nightjar.jobs.store import Store, postgres
from tests.jobs import submit_for

SETTINGS = (
    "statement_timeout",
    "lock_timeout",
    "idle_in_transaction_session_timeout",
    "synchronous_commit",
)
OF_SERVER = ["0", "0", "0", "on"]


@pytest.fixture
def pooled(postgres_tables: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """It has one session, so that a change of it is seen."""
    monkeypatch.setattr(postgres, "is_direct", lambda connection: False)
    with closing(Store(postgres_tables)) as store:
        yield store


def settings(connection: sa.Connection) -> list[str]:
    return [str(connection.scalar(sa.text(f"SHOW {name}"))) for name in SETTINGS]


@pytest.mark.parametrize("durable", [True, False])
def test_a_transaction_sets_its_limits_for_itself(pooled: Store, durable: bool) -> None:
    limits = ["1min", "30s", "15s", "on" if durable else "off"]
    assert pooled.database.write(settings, durable=durable) == limits
    with pooled.database.reading() as connection:
        assert settings(connection) == OF_SERVER


def test_nothing_is_prepared(pooled: Store) -> None:
    for _ in range(20):
        pooled.ping()
    with pooled.database.reading() as connection:
        count = sa.text("SELECT count(*) FROM pg_prepared_statements")
        assert [connection.scalar(count) for _ in range(20)] == [0] * 20


def test_what_needs_a_session_says_so(pooled: Store) -> None:
    with pytest.raises(NoSessionError, match=r"an upload .* NIGHTJAR_DATABASE_DIRECT_URL"):
        submit_for(pooled, "default", 1)
    with pytest.raises(NoSessionError, match=r"a migration .* NIGHTJAR_DATABASE_DIRECT_URL"):
        pooled.migrate()


def test_a_connection_that_stood_idle_is_looked_at(
    pooled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "TRUSTED_S", 0.0)
    pooled.ping()
    pooled.ping()
    with pooled.database.reading() as connection:
        assert settings(connection) == OF_SERVER
