"""The lease protocol's state machine, for as long as only this suite may take."""

import pytest
from hypothesis import HealthCheck, settings

from tests.lease_protocol import LeaseProtocol


class LongLeaseProtocol(LeaseProtocol):
    """The same machine, under a name of its own."""


LongLeaseProtocol.TestCase.settings = settings(
    max_examples=1_000,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
class TestLongLeaseProtocol(LongLeaseProtocol.TestCase):  # type: ignore[misc,name-defined]
    """A thousand orders of events."""
