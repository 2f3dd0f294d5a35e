"""The lease protocol's state machine, for as long as only this suite may take."""

import pytest
from hypothesis import HealthCheck, settings

from tests.lease_protocol import LeaseProtocol, PostgresLeaseProtocol
from tests.postgres_schemas import Schemas


def many(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


class LongLeaseProtocol(LeaseProtocol):
    """The same machine, under a name of its own."""


class LongPostgresLeaseProtocol(PostgresLeaseProtocol):
    """The same machine, under a name of its own."""


LongLeaseProtocol.TestCase.settings = many(1_000)
LongPostgresLeaseProtocol.TestCase.settings = many(100)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
class TestLongLeaseProtocol(LongLeaseProtocol.TestCase):  # type: ignore[misc,name-defined]
    """A thousand orders of events."""


@pytest.fixture(scope="class")
def on_postgres(postgres_schemas: Schemas) -> None:
    LongPostgresLeaseProtocol.schemas = postgres_schemas


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.usefixtures("on_postgres")
class TestLongPostgresLeaseProtocol(
    LongPostgresLeaseProtocol.TestCase  # type: ignore[misc,name-defined]
):
    """A hundred orders of events on PostgreSQL."""
