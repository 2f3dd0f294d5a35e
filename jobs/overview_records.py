"""What people look at: records of the web page, filled by the store.

Every number of a large job comes from a bounded number of rows. Where that is a sample, the record
says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from nightjar.jobs.records import Job
from nightjar.jobs.states import JobState, MicroBatchState, RequestKind


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs of a tenant are listed; an empty field asks for nothing."""

    tenant: str
    states: tuple[JobState, ...] = ()
    model: str = ""
    text: str = ""  # in the id, the model or the metadata


@dataclass(frozen=True, slots=True)
class ListedJobs:
    """A page of jobs, newest first.

    Attributes:
        jobs: The jobs that fit the filter.
        next_after: The id that the next page begins behind; None at the end.
        searched: How many jobs were looked at, where the filter has a model or a text.
    """

    jobs: list[Job]
    next_after: str | None
    searched: int | None = None


@dataclass(frozen=True, slots=True)
class StageCount:
    """Micro-batches of a job in one state, of one kind and bucket."""

    state: MicroBatchState
    kind: RequestKind
    bucket: int  # upper length in tokens
    micro_batches: int
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Stages:
    """Where the micro-batches of a job stand; of each state the newest ones, up to a limit."""

    counts: Sequence[StageCount]
    truncated: bool  # a state has more micro-batches than were counted


@dataclass(frozen=True, slots=True)
class LandedPoint:
    """When a position in the order of landing was reached."""

    position: int  # from 0
    at: datetime


@dataclass(frozen=True, slots=True)
class LandedLengths:
    """The tokens of one landed row."""

    prompt: int
    requested: int  # 0 for a ranking
    generated: int


@dataclass(frozen=True, slots=True)
class LengthSample:
    """Lengths of landed rows: one of each stretch of equally many rows, chosen at random."""

    rows: Sequence[LandedLengths]
    searched: int  # places that were looked at; those without a success have no length
    whole: bool  # every row of the job was looked at


@dataclass(frozen=True, slots=True)
class FailureReason:
    """Failures of one error code; `message` and `param` are of the first of them."""

    code: str
    rows: int
    message: str
    param: str | None
    first_row: int


@dataclass(frozen=True, slots=True)
class FailureReasons:
    """Failures grouped by code, the most frequent first."""

    reasons: Sequence[FailureReason]
    truncated: bool  # there are more failures than were grouped


@dataclass(frozen=True, slots=True)
class FailedRow:
    """One failed row, without its body."""

    index: int
    line: int
    custom_id: str | None
    code: str
    message: str
    param: str | None


@dataclass(frozen=True, slots=True)
class HeldMicroBatch:
    """What a GPU worker computes now."""

    job_id: str
    tenant: str
    kind: RequestKind
    bucket: int
    rows: int
    tokens: int
    live: bool  # a single call


@dataclass(frozen=True, slots=True)
class ServedView:
    """A model of a GPU worker, as the worker's last sign of life says."""

    name: str
    device: str = ""
    precision: str = ""
    running: int = 0  # sequences in the engine's batch
    slots: int = 0  # as many as it has room for
    waiting: int = 0  # requests that wait for a slot
    kv_blocks: int = 0  # of the cache of keys and values
    kv_held: int = 0  # blocks of running sequences
    kv_cached: int = 0  # blocks that only keep a prefix


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A GPU worker that has given a sign of life within a day."""

    owner: str
    seen_at: datetime
    engine_s: float
    load_s: float
    models: Sequence[ServedView]  # named by a fingerprint where the planner does not know it
    held: Sequence[HeldMicroBatch]


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Micro-batches of one model, kind and bucket that wait or are computed.

    Attributes:
        waiting: In SQL, ready to be dispatched.
        dispatched: Their messages are in the broker.
        computing: A worker holds them.
        oldest_at: When the oldest job with waiting work was made; None if nothing waits.
        truncated: More may wait: so many were not counted.
    """

    model: str
    kind: RequestKind
    bucket: int
    waiting: int
    dispatched: int
    computing: int
    rows: int
    tokens: int
    oldest_at: datetime | None
    truncated: bool


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A browser that has signed in, and the key that it signed in with."""

    key_sha256: str
    key_prefix: str | None  # None: the operator's own secret, which is not stored
    expires_at: datetime


Rates = Mapping[str, float]
"""Rows a second of jobs that run, by their ids."""
