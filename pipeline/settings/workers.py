"""Settings of planners and workers: how work is cut, and when a process counts as dead."""

from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings

from nightjar.pipeline.settings.read_by import (
    API,
    BEAT,
    GPU_WORKER,
    PLANNER,
    TASK_RUNNER,
    UPLOADS,
    read_by,
)

OF_PLANNER = read_by(PLANNER)
OF_GPU_WORKER = read_by(GPU_WORKER)


class PlanningSettings(BaseSettings):
    """Planning."""

    plan_chunk_requests: Annotated[int, OF_PLANNER] = Field(
        4096, ge=1, description="most requests planned in one transaction"
    )
    plan_chunk_bytes: Annotated[int, OF_PLANNER] = Field(
        8 << 20, ge=1, description="most bytes of request bodies that the planner holds at once"
    )
    plan_chunk_tokens: Annotated[int, OF_PLANNER] = Field(
        1 << 20,
        ge=1,
        description="most tokens that the planner holds at once, but for one request's",
    )
    plan_attempts: Annotated[int, OF_PLANNER] = Field(
        5,
        ge=1,
        description="failures in a row of a job's planning, after which its waiting requests "
        "fail; also of reading a batch's file",
    )
    micro_batch_requests: Annotated[int, OF_PLANNER] = Field(
        128, ge=1, description="most requests in one micro-batch"
    )
    micro_batch_tokens: Annotated[int, read_by(PLANNER, API)] = Field(
        16_384, ge=1, description="token budget of one micro-batch"
    )
    dispatch_window: Annotated[int, OF_PLANNER] = Field(
        16,
        ge=1,
        description="micro-batches in the broker or in flight; the rest wait in SQL. Where workers "
        "hold many leases there are up to three times as many as those",
    )


class WorkerSettings(BaseSettings):
    """Workers."""

    worker_threads: Annotated[int, OF_GPU_WORKER] = Field(
        4,
        ge=1,
        description="micro-batches of jobs in one engine at a time; a worker of several models "
        "has so many threads for each",
    )
    pack_answers: Annotated[bool, read_by(PLANNER, GPU_WORKER, page="guides/upgrading.md")] = Field(
        True,
        description="store answers that land together as one compressed value; false while an API "
        "of a version before runs, which cannot read them",
    )
    receipts: Annotated[bool, read_by(GPU_WORKER, page="reference/requests.md")] = Field(
        False, description="write into each answer what it was computed with"
    )
    worker_live_threads: Annotated[int, OF_GPU_WORKER] = Field(
        16,
        ge=1,
        description="single calls in one GPU worker at a time, of all its models, beside the "
        "micro-batches of jobs",
    )
    worker_niceness: Annotated[int, read_by(UPLOADS, PLANNER, GPU_WORKER, TASK_RUNNER)] = Field(
        10,
        ge=0,
        le=19,
        description="niceness of planners, workers and uploads, so that the API answers sooner",
    )
    worker_stuck_after_s: Annotated[float, read_by(PLANNER, GPU_WORKER)] = Field(
        60.0,
        gt=0,
        description="a worker with an idle thread that takes nothing for so long while messages "
        "wait for it ends, to be started again",
    )
    heartbeat_s: Annotated[float, read_by(GPU_WORKER, TASK_RUNNER)] = Field(
        1.0, gt=0, description="seconds between two heartbeats of a worker"
    )
    worker_dead_after_s: Annotated[float, read_by(API, PLANNER, TASK_RUNNER)] = Field(
        7.0, gt=0, description="a worker without a heartbeat for so long is dead"
    )
    sweep_every_s: Annotated[float, read_by(PLANNER, BEAT, TASK_RUNNER)] = Field(
        1.0, gt=0, description="seconds between two sweeps"
    )
    redispatch_after_s: Annotated[float, OF_PLANNER] = Field(
        20.0,
        gt=0,
        description="a message that nobody claims for so long is checked and sent again",
    )
    drain_s: Annotated[float, read_by(PLANNER, GPU_WORKER)] = Field(
        90.0,
        ge=0,
        description="seconds that a worker told to end continues to compute what it has begun; "
        "then it gives the rest back",
    )
    request_crashes: Annotated[int, OF_GPU_WORKER] = Field(
        3, ge=1, description="crashes of a request that is computed alone, after which it fails"
    )
    request_worker_deaths: Annotated[int, OF_PLANNER] = Field(
        10,
        ge=1,
        description="deaths of a worker, for whatever reason, beside a request that is computed "
        "alone, after which it fails",
    )
