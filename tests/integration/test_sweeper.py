"""The sweeper over real stores: what stands still on its own clock loses its lease."""

import pytest

from nightjar.jobs.records import ComputeSeconds, MicroBatchRef
from nightjar.jobs.store import Store
from nightjar.pipeline.sweeper import Sweeper, SweepReport
from tests.jobs import planned


class Clock:
    """A monotonic clock that tests move by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sweeper(store: Store, clock: Clock) -> Sweeper:
    return Sweeper(store, dead_after_s=10, redispatch_after_s=60, clock=clock)


def claim(store: Store, ref: MicroBatchRef, owner: str) -> None:
    store.beat(owner, ComputeSeconds())
    assert store.claim(ref.id, ref.epoch, owner) is not None


def test_a_silent_worker_loses_its_leases_and_a_living_one_does_not(
    store: Store, sweeper: Sweeper, clock: Clock
) -> None:
    _, (first, second, third) = planned(store, 3)
    claim(store, first, "silent")
    claim(store, second, "silent")
    claim(store, third, "alive")
    assert sweeper.sweep() == SweepReport(released=0, requeued=0)
    clock.now += 9.9
    store.beat("alive", ComputeSeconds())
    assert sweeper.sweep() == SweepReport(released=0, requeued=0)
    clock.now += 0.1
    assert sweeper.sweep() == SweepReport(released=2, requeued=0)
    assert [(ref.id, ref.epoch) for ref in store.dispatchable(10)] == [
        (first.id, 1),
        (second.id, 1),
    ]
    assert store.claim(first.id, 0, "late") is None
    assert store.finish(second.id, 0, "silent", []) is False


def test_a_new_sweeper_waits_a_whole_period(store: Store, sweeper: Sweeper, clock: Clock) -> None:
    _, (ref,) = planned(store, 1)
    claim(store, ref, "silent")
    clock.now += 1_000_000
    assert sweeper.sweep().released == 0


def test_a_worker_that_never_beat_is_swept_too(
    store: Store, sweeper: Sweeper, clock: Clock
) -> None:
    _, (ref,) = planned(store, 1)
    assert store.claim(ref.id, 0, "never beat") is not None
    sweeper.sweep()
    clock.now += 10
    assert sweeper.sweep().released == 1


def test_a_message_that_nobody_claims_is_ready_again_once_a_period(
    store: Store, sweeper: Sweeper, clock: Clock
) -> None:
    _, refs = planned(store, 2)
    store.mark_dispatched(refs)
    sweeper.sweep()
    clock.now += 60
    claim(store, refs[1], "worker")
    assert sweeper.sweep() == SweepReport(released=0, requeued=1)
    assert store.dispatchable(10) == [refs[0]]
    store.mark_dispatched([refs[0]])
    clock.now += 59
    assert sweeper.sweep().requeued == 0
    clock.now += 60
    assert sweeper.sweep().requeued == 1
