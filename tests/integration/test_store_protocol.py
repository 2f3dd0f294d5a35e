"""The lease protocol's state machine on both databases: a few orders of events."""

import pytest
from hypothesis import HealthCheck, settings

from tests.databases import Statement
from tests.lease_protocol import LeaseProtocol, PostgresLeaseProtocol

LeaseProtocol.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLeaseProtocol = LeaseProtocol.TestCase

# Each example makes a database anew, which takes longer there.
PostgresLeaseProtocol.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.fixture(scope="class")
def on_postgres(postgres_server: str, postgres_migration: list[Statement]) -> None:
    PostgresLeaseProtocol.server = postgres_server
    PostgresLeaseProtocol.migration = postgres_migration


@pytest.mark.usefixtures("on_postgres")
class TestPostgresLeaseProtocol(PostgresLeaseProtocol.TestCase):  # type: ignore[misc,name-defined]
    """Orders of events on PostgreSQL."""
