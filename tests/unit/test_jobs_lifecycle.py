"""The table of states."""

import pytest

from nightjar.jobs import lifecycle
from nightjar.jobs.errors import LifecycleError
from nightjar.jobs.records import JobState, MicroBatchState, RequestState

TABLES = [
    lifecycle.JOB_TRANSITIONS,
    lifecycle.REQUEST_TRANSITIONS,
    lifecycle.MICRO_BATCH_TRANSITIONS,
]


@pytest.mark.parametrize("states", [JobState, RequestState, MicroBatchState])
def test_every_state_is_in_its_table(states: type) -> None:
    table = next(table for table in TABLES if isinstance(next(iter(table)), states))
    assert set(table) == set(states)


@pytest.mark.parametrize("table", TABLES)
def test_every_state_can_be_reached_and_left_for_an_end(table: dict) -> None:
    first = next(iter(table))
    reached, frontier = {first}, [first]
    while frontier:
        frontier = [after for state in frontier for after in table[state] if after not in reached]
        reached.update(frontier)
    assert reached == set(table)
    assert any(not followers for followers in table.values())


def test_sources_of_a_state() -> None:
    before = lifecycle.states_before(lifecycle.MICRO_BATCH_TRANSITIONS, MicroBatchState.LEASED)
    assert set(before) == {MicroBatchState.READY, MicroBatchState.DISPATCHED}
    with pytest.raises(LifecycleError, match="queued"):
        lifecycle.states_before(lifecycle.JOB_TRANSITIONS, JobState.QUEUED)


def test_a_forbidden_step() -> None:
    with pytest.raises(LifecycleError, match="'done' may not be followed by 'ready'"):
        lifecycle.check_step(
            lifecycle.MICRO_BATCH_TRANSITIONS, MicroBatchState.DONE, MicroBatchState.READY
        )


@pytest.mark.parametrize(
    ("completed", "failed", "cancel_requested", "state"),
    [
        (3, 0, False, JobState.COMPLETED),
        (2, 1, False, JobState.COMPLETED_WITH_FAILURES),
        (0, 3, False, JobState.FAILED),
        (2, 1, True, JobState.CANCELLED),
    ],
)
def test_how_a_job_ends(
    completed: int, failed: int, cancel_requested: bool, state: JobState
) -> None:
    final = lifecycle.final_job_state(completed, failed, cancel_requested=cancel_requested)
    assert final is state
