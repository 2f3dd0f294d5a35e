"""The lease protocol's state machine on both databases: a few orders of events."""

import pytest
from hypothesis import HealthCheck, settings

from tests.lease_protocol import LeaseProtocol, PostgresLeaseProtocol
from tests.postgres_schemas import Schemas

LeaseProtocol.TestCase.settings = settings(
    max_examples=8,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLeaseProtocol = LeaseProtocol.TestCase

# A statement takes longer there.
PostgresLeaseProtocol.TestCase.settings = settings(
    max_examples=5,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.fixture(scope="class")
def on_postgres(postgres_schemas: Schemas) -> None:
    PostgresLeaseProtocol.schemas = postgres_schemas


@pytest.mark.usefixtures("on_postgres")
class TestPostgresLeaseProtocol(PostgresLeaseProtocol.TestCase):  # type: ignore[misc,name-defined]
    """Orders of events on PostgreSQL."""
