"""Which state may follow which: the one table that the store's guards are made of."""

from collections.abc import Mapping
from typing import TypeVar

from nightjar.jobs.errors import LifecycleError
from nightjar.jobs.states import JobState, MicroBatchState, RequestState, StopReason

State = TypeVar("State", JobState, RequestState, MicroBatchState)

JOB_TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset(
        {JobState.RUNNING, JobState.PAUSED, JobState.FAILED, JobState.CANCELLING}
    ),
    JobState.RUNNING: frozenset(
        {
            JobState.PAUSED,
            JobState.COMPLETED,
            JobState.COMPLETED_WITH_FAILURES,
            JobState.FAILED,
            JobState.CANCELLING,
        }
    ),
    # What is leased when a job is paused still finishes, and may be the last of it.
    JobState.PAUSED: frozenset(
        {
            JobState.QUEUED,
            JobState.RUNNING,
            JobState.COMPLETED,
            JobState.COMPLETED_WITH_FAILURES,
            JobState.FAILED,
            JobState.CANCELLING,
        }
    ),
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.EXPIRED}),
    JobState.COMPLETED: frozenset(),
    # Back: failures were retried by hand.
    JobState.COMPLETED_WITH_FAILURES: frozenset({JobState.QUEUED, JobState.RUNNING}),
    JobState.FAILED: frozenset({JobState.QUEUED, JobState.RUNNING}),
    JobState.CANCELLED: frozenset(),
    JobState.EXPIRED: frozenset(),
}

REQUEST_TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: frozenset(
        {
            RequestState.FOLLOWING,
            RequestState.PLANNED,
            RequestState.DONE,  # its answer was known
            RequestState.FAILED,
            RequestState.CANCELLED,
        }
    ),
    # With its leader, and to the same end.
    RequestState.FOLLOWING: frozenset(
        {RequestState.DONE, RequestState.FAILED, RequestState.CANCELLED}
    ),
    # Queued again: its micro-batch was planned for a model that is not served any more.
    RequestState.PLANNED: frozenset(
        {RequestState.QUEUED, RequestState.DONE, RequestState.FAILED, RequestState.CANCELLED}
    ),
    RequestState.DONE: frozenset(),
    # Retried by hand: planned again, or computed alone if it had crashed, or with its leader.
    RequestState.FAILED: frozenset(
        {RequestState.QUEUED, RequestState.PLANNED, RequestState.FOLLOWING}
    ),
    RequestState.CANCELLED: frozenset(),
}

MICRO_BATCH_TRANSITIONS: Mapping[MicroBatchState, frozenset[MicroBatchState]] = {
    MicroBatchState.READY: frozenset(
        {
            MicroBatchState.DISPATCHED,
            MicroBatchState.LEASED,
            MicroBatchState.CANCELLED,
            MicroBatchState.REPLANNED,
        }
    ),
    MicroBatchState.DISPATCHED: frozenset(
        {
            MicroBatchState.READY,
            MicroBatchState.LEASED,
            MicroBatchState.CANCELLED,
            MicroBatchState.REPLANNED,
        }
    ),
    # Back to ready: its worker gave it back or died; the epoch rises with it.
    MicroBatchState.LEASED: frozenset(
        {
            MicroBatchState.READY,
            MicroBatchState.DONE,
            MicroBatchState.CANCELLED,
            MicroBatchState.SPLIT,
        }
    ),
    MicroBatchState.DONE: frozenset(),
    MicroBatchState.CANCELLED: frozenset(),
    MicroBatchState.SPLIT: frozenset(),
    MicroBatchState.REPLANNED: frozenset(),
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


# Jobs of which work may be planned, dispatched and claimed.
RUNNABLE = [JobState.QUEUED, JobState.RUNNING]
# Jobs of which failures may be retried.
RETRIABLE = [*RUNNABLE, JobState.PAUSED, JobState.COMPLETED_WITH_FAILURES, JobState.FAILED]


def final_job_state(completed: int, failed: int, stop: StopReason | None) -> JobState:
    """What a job becomes when its last request has its outcome."""
    if stop is not None:
        return JobState.EXPIRED if stop is StopReason.EXPIRED else JobState.CANCELLED
    if failed == 0:
        return JobState.COMPLETED
    return JobState.COMPLETED_WITH_FAILURES if completed else JobState.FAILED
