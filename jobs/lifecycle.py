"""Which state may follow which: the one table that the store's guards are made of."""

from collections.abc import Mapping
from typing import TypeVar

from nightjar.jobs.errors import LifecycleError
from nightjar.jobs.states import (
    BatchStage,
    BatchStatus,
    JobState,
    MicroBatchState,
    RequestState,
    StopReason,
)

State = TypeVar("State", JobState, RequestState, MicroBatchState, BatchStage)

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

BATCH_TRANSITIONS: Mapping[BatchStage, frozenset[BatchStage]] = {
    BatchStage.VALIDATING: frozenset({BatchStage.FAILED, BatchStage.CANCELLED, BatchStage.LANDED}),
    BatchStage.FAILED: frozenset(),
    BatchStage.CANCELLED: frozenset(),
    BatchStage.LANDED: frozenset({BatchStage.FINAL}),
    BatchStage.FINAL: frozenset(),
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


# A job's last states: what its batch becomes when the result files exist.
BATCH_ENDS: Mapping[JobState, BatchStatus] = {
    JobState.COMPLETED: BatchStatus.COMPLETED,
    JobState.COMPLETED_WITH_FAILURES: BatchStatus.COMPLETED,
    JobState.FAILED: BatchStatus.COMPLETED,  # without an output file
    JobState.CANCELLED: BatchStatus.CANCELLED,
    JobState.EXPIRED: BatchStatus.EXPIRED,
}


def batch_status(stage: BatchStage, job: JobState | None, *, cancelling: bool) -> BatchStatus:
    """What a batch is called in OpenAI's API.

    Args:
        stage: Of the batch.
        job: The state of its job; None before its rows have landed.
        cancelling: Somebody has asked for its end.
    """
    if stage is BatchStage.VALIDATING:
        return BatchStatus.CANCELLING if cancelling else BatchStatus.VALIDATING
    if stage is BatchStage.FAILED or stage is BatchStage.CANCELLED:
        return BatchStatus(stage.value)
    if job is None:
        raise LifecycleError(f"a batch that is {stage.value!r} has a job")
    if job in BATCH_ENDS:
        ended = BATCH_ENDS[job]
        if stage is BatchStage.FINAL:
            return ended
        # A client that has cancelled sees no other status before the last one.
        is_cancelled = ended is BatchStatus.CANCELLED
        return BatchStatus.CANCELLING if is_cancelled else BatchStatus.FINALIZING
    is_cancelling = job is JobState.CANCELLING and cancelling
    # Paused, and stopped by the deadline: rows that are being computed still land.
    return BatchStatus.CANCELLING if is_cancelling else BatchStatus.IN_PROGRESS
