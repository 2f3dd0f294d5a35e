"""The states of jobs, requests and micro-batches, and other closed lists of words."""

from enum import StrEnum


class RequestKind(StrEnum):
    """What a request asks for."""

    GENERATE = "generate"
    RANK = "rank"


class JobState(StrEnum):
    """Where a job stands; the transitions are in jobs/lifecycle.py."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"  # every row succeeded
    COMPLETED_WITH_FAILURES = "completed_with_failures"
    FAILED = "failed"  # no row succeeded
    PAUSED = "paused"  # leased micro-batches finish, nothing else begins
    CANCELLING = "cancelling"  # being stopped: leased micro-batches may still finish
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline came first


class StopReason(StrEnum):
    """Why a job ends before all of it is computed; the error code of what was not."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"


class RequestState(StrEnum):
    """Where a request stands."""

    QUEUED = "queued"  # accepted, not yet in a micro-batch
    FOLLOWING = "following"  # an equal request of its job is computed, and answers for it
    PLANNED = "planned"  # member of a micro-batch
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"  # not computed: its job was cancelled, or expired


class MicroBatchState(StrEnum):
    """Where a micro-batch stands."""

    READY = "ready"  # waits in SQL
    DISPATCHED = "dispatched"  # its message is (or was) in the broker
    LEASED = "leased"  # a worker computes it
    DONE = "done"
    CANCELLED = "cancelled"
    SPLIT = "split"  # it crashed; its requests go on in smaller ones, each computed alone
    REPLANNED = "replanned"  # taken apart for another model; its requests are queued again


class Reuse(StrEnum):
    """Where an answer comes from that was not computed for its request."""

    JOB = "job"  # an equal request of the same job
    CACHE = "cache"  # an equal request of an earlier time


class BatchStage(StrEnum):
    """How far a batch has come beside its job; stored with the batch."""

    VALIDATING = "validating"  # its file is read, or waits for that; there is no job yet
    FAILED = "failed"  # its file cannot be used
    CANCELLED = "cancelled"  # before it had a job
    LANDED = "landed"  # its rows are a job, which says how it stands
    FINAL = "final"  # its job is over, and its result files exist


class BatchStatus(StrEnum):
    """What OpenAI's API says of a batch; derived by `lifecycle.batch_status`, never stored."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class Scope(StrEnum):
    """What a key of the API may do; each scope includes those before it."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"
