"""Which state may follow which: the one table that the store's guards are made of."""

from collections.abc import Mapping
from typing import TypeVar

from nightjar.jobs.errors import LifecycleError
from nightjar.jobs.records import JobState, MicroBatchState, RequestState

State = TypeVar("State", JobState, RequestState, MicroBatchState)

JOB_TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.FAILED, JobState.CANCELLING}),
    JobState.RUNNING: frozenset(
        {
            JobState.COMPLETED,
            JobState.COMPLETED_WITH_FAILURES,
            JobState.FAILED,
            JobState.CANCELLING,
        }
    ),
    JobState.CANCELLING: frozenset({JobState.CANCELLED}),
    JobState.COMPLETED: frozenset(),
    JobState.COMPLETED_WITH_FAILURES: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}

REQUEST_TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: frozenset(
        {RequestState.PLANNED, RequestState.FAILED, RequestState.CANCELLED}
    ),
    RequestState.PLANNED: frozenset(
        {RequestState.DONE, RequestState.FAILED, RequestState.CANCELLED}
    ),
    RequestState.DONE: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.CANCELLED: frozenset(),
}

MICRO_BATCH_TRANSITIONS: Mapping[MicroBatchState, frozenset[MicroBatchState]] = {
    MicroBatchState.READY: frozenset(
        {MicroBatchState.DISPATCHED, MicroBatchState.LEASED, MicroBatchState.CANCELLED}
    ),
    MicroBatchState.DISPATCHED: frozenset(
        {MicroBatchState.READY, MicroBatchState.LEASED, MicroBatchState.CANCELLED}
    ),
    # Back to ready: its worker gave it back or died; the epoch rises with it.
    MicroBatchState.LEASED: frozenset(
        {MicroBatchState.READY, MicroBatchState.DONE, MicroBatchState.CANCELLED}
    ),
    MicroBatchState.DONE: frozenset(),
    MicroBatchState.CANCELLED: frozenset(),
}


def states_before(table: Mapping[State, frozenset[State]], target: State) -> list[State]:
    """Every state that may be followed by `target`; raises LifecycleError if there is none."""
    sources = [state for state, followers in table.items() if target in followers]
    if not sources:
        raise LifecycleError(f"no state may be followed by {target.value!r}")
    return sources


def check_step(table: Mapping[State, frozenset[State]], source: State, target: State) -> State:
    """`target`, if it may follow `source`; LifecycleError otherwise."""
    if target not in table[source]:
        raise LifecycleError(f"{source.value!r} may not be followed by {target.value!r}")
    return target


def final_job_state(completed: int, failed: int, *, cancel_requested: bool) -> JobState:
    """What a job becomes when its last request has its outcome."""
    if cancel_requested:
        return JobState.CANCELLED
    if failed == 0:
        return JobState.COMPLETED
    return JobState.COMPLETED_WITH_FAILURES if completed else JobState.FAILED
