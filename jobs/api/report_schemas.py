"""The answer of a job's report, as the OpenAPI document describes it."""

from typing import Literal

from typing_extensions import TypedDict


class ReportedJob(TypedDict):
    """The job at the moment of its report."""

    id: str
    model: str
    tenant: str
    priority: int
    total: int
    completed: int
    failed: int
    cancelled: int
    state: str
    reused: int
    metadata: dict[str, str]
    created_at: str | None
    started_at: str | None
    finished_at: str | None


class ReportedRates(TypedDict):
    """Rows and tokens that landed, by bins of time from the first claim on."""

    begins_at: str
    bin_s: float
    rows: list[int]
    tokens: list[int]


class ReportedLane(TypedDict):
    """Micro-batches of one kind and bucket; rows at work, by bins of time."""

    kind: str
    bucket: int
    micro_batches: int
    rows: int
    computing: list[float]


class ReportedTimeline(TypedDict):
    """Rows in each stage, by bins of time."""

    begins_at: str
    bin_s: float
    queued: list[float]
    planned: list[float]
    computing: list[float]
    landed: list[float]
    rates: ReportedRates
    lanes: list[ReportedLane]
    micro_batches_without_moments: int


class ReportedLengths(TypedDict):
    """Rows by their lengths in tokens; `edges` are the upper ends of the bins."""

    edges: list[int]
    prompts: list[int]
    requested: list[int]
    generated: list[int]
    buckets: list[int]


class ReportedBill(TypedDict):
    """What was computed, and what was spared."""

    tenant: str
    schedule: str | None  # that made the job; null: none did
    rows_computed: int
    rows_not_computed: int
    prompt_tokens: int
    prefilled_tokens: int
    cached_tokens: int
    decoded_tokens: int
    requested_tokens: int
    saved_by_stops_tokens: int
    saved_by_pruning_tokens: int
    pruned_documents: int
    reused_rows: int
    reused_tokens: int
    padding_avoided_tokens: int
    engine_s: float
    engine_steps: int
    lease_s: float


class ReportedVersions(TypedDict):
    """Results by the version and the precision that made them; micro-batches by model."""

    nightjar: dict[str, int]
    precisions: dict[str, int]
    model_fingerprints: dict[str, int]


class ReportedSample(TypedDict):
    """One row that failed."""

    line: int
    custom_id: str | None
    message: str
    param: str | None


class ReportedReason(TypedDict):
    """Rows that failed with one code, and some of them."""

    code: str
    count: int
    samples: list[ReportedSample]


class ReportedFailures(TypedDict):
    """Failures by reason; `complete` says whether all were counted."""

    reasons: list[ReportedReason]
    counted: int
    complete: bool


class ReportedAgain(TypedDict):
    """What was computed again, and why."""

    leases_taken_back: int
    claims_again: int
    crashes: int
    worker_deaths: int
    split: int
    suspects: int
    replanned: int
    retried: int
    in_higher_precision: dict[str, int]


class JobReportPayload(TypedDict):
    """What became of a job, and what it cost; lists of the timeline have an entry a bin."""

    object: Literal["job.report"]
    made_at: str
    complete: bool
    job: ReportedJob
    timeline: ReportedTimeline
    lengths: ReportedLengths
    bill: ReportedBill
    finish_reasons: dict[str, int]
    failures: ReportedFailures
    recomputed: ReportedAgain
    versions: ReportedVersions
    limit: None
