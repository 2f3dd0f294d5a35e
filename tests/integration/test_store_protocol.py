"""The lease protocol's state machine: a few orders of events."""

from hypothesis import HealthCheck, settings

from tests.lease_protocol import LeaseProtocol

LeaseProtocol.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLeaseProtocol = LeaseProtocol.TestCase
