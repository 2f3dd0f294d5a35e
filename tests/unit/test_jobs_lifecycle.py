"""The table of states."""

import re
from pathlib import Path

import pytest

from nightjar.jobs import lifecycle
from nightjar.jobs.errors import LifecycleError
from nightjar.jobs.states import BatchStage, JobState, MicroBatchState, RequestState, StopReason

TABLES = [
    lifecycle.JOB_TRANSITIONS,
    lifecycle.REQUEST_TRANSITIONS,
    lifecycle.MICRO_BATCH_TRANSITIONS,
    lifecycle.BATCH_TRANSITIONS,
]


@pytest.mark.parametrize("states", [JobState, RequestState, MicroBatchState, BatchStage])
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
    with pytest.raises(LifecycleError, match="planned"):
        lifecycle.states_before({RequestState.QUEUED: frozenset()}, RequestState.PLANNED)


def test_a_forbidden_step() -> None:
    with pytest.raises(LifecycleError, match="'done' may not be followed by 'ready'"):
        lifecycle.check_step(
            lifecycle.MICRO_BATCH_TRANSITIONS, MicroBatchState.DONE, MicroBatchState.READY
        )


@pytest.mark.parametrize(
    ("completed", "failed", "stop", "state"),
    [
        (3, 0, None, JobState.COMPLETED),
        (2, 1, None, JobState.COMPLETED_WITH_FAILURES),
        (0, 3, None, JobState.FAILED),
        (2, 1, StopReason.CANCELLED, JobState.CANCELLED),
        (2, 1, StopReason.EXPIRED, JobState.EXPIRED),
    ],
)
def test_how_a_job_ends(
    completed: int, failed: int, stop: StopReason | None, state: JobState
) -> None:
    assert lifecycle.final_job_state(completed, failed, stop) is state


@pytest.mark.parametrize("state", lifecycle.RUNNABLE)
def test_a_job_that_may_run_can_be_paused_cancelled_and_ended(state: JobState) -> None:
    followers = lifecycle.JOB_TRANSITIONS[state]
    assert {JobState.PAUSED, JobState.CANCELLING, JobState.FAILED} <= followers


def drawn(name: str) -> set[tuple[str, str]]:
    """The arrows of a state diagram in docs/reference/states.md."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "states.md").read_text()
    (diagram,) = re.findall(rf"%% {name}\n(.*?)```", page, re.DOTALL)
    return {(a, b) for a, b in re.findall(r"(\w+) --> (\w+)", diagram)}


@pytest.mark.parametrize(
    ("name", "table"), list(zip(["job", "request", "micro-batch", "batch"], TABLES, strict=True))
)
def test_the_documented_diagrams_are_the_tables(name: str, table: dict) -> None:
    arrows = {
        (source.value, target.value) for source, targets in table.items() for target in targets
    }
    assert drawn(name) == arrows
