"""What the API answers, as types.

`payloads.py` builds these dictionaries, so mypy compares each field with the record it comes from.
FastAPI reads the same types for the OpenAPI document. Answers are sent as they are built: nothing
copies or checks them again, which would cost more than a page of results itself.
"""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from nightjar.jobs.events import DeliveryState, EventType
from nightjar.jobs.lines.line_shapes import OutputLine
from nightjar.jobs.states import JobState


class ErrorFields(TypedDict):
    """What went wrong: `code` is for programs, `message` for people, `param` the part at fault."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(TypedDict):
    """Every answer with a status of 400 or more."""

    error: ErrorFields


class JobCounts(TypedDict):
    """Rows of a job by outcome."""

    total: int
    completed: int
    failed: int
    cancelled: int
    reused: int


class JobUsage(TypedDict):
    """Tokens of a job's finished rows."""

    prompt_tokens: int
    requested_tokens: int
    generated_tokens: int
    saved_tokens: int
    reused_tokens: int


class JobPayload(TypedDict):
    """A job; moments are seconds since 1970.

    `keep_results_s` is what its submitter asked for. Since `purged_at` its requests and results are
    gone. An `open` job takes more rows.
    """

    id: str
    object: Literal["job"]
    state: JobState
    model: str
    priority: int
    counts: JobCounts
    usage: JobUsage
    requests_per_second: float | None
    created_at: float
    started_at: float | None
    finished_at: float | None
    expires_at: float | None
    keep_results_s: int | None
    purged_at: float | None
    open: bool
    cancel_requested: bool
    metadata: dict[str, str]


class SubmittedJob(JobPayload):
    """A job that was just submitted; without counts where its idempotency key was known."""

    accepted: NotRequired[int]
    rejected: NotRequired[int]
    warning: NotRequired[str | None]


class AppendedRows(TypedDict):
    """What an append did: `total` is how many rows the job has now."""

    job_id: str
    total: int
    rejected: int
    existing: bool
    warning: str | None


class ResumedJob(JobPayload):
    """A job that goes on; `warning` says why it may begin late."""

    warning: str | None


class RetriedJob(ResumedJob):
    """A job, and how many of its rows are computed again."""

    retried: int


class JobDetail(JobPayload):
    """A job with its micro-batches by state, and what it waits for."""

    waits_for: list[str]
    waiting: str | None
    micro_batches: dict[str, int]


class JobList(TypedDict):
    """A page of jobs, newest first."""

    object: Literal["list"]
    data: list[JobPayload]
    has_more: bool
    next_after: str | None


class ResultsPage(TypedDict):
    """A page of outcomes; ask on with `after=next_after` until `complete` is true."""

    object: Literal["list"]
    data: list[OutputLine]
    has_more: bool
    next_after: int
    complete: bool
    waits_for_row: int | None


class Health(TypedDict):
    """Whether jobs are taken, and what each part of the deployment says."""

    status: Literal["ok", "unavailable"]
    version: str
    message: NotRequired[str]
    parts: dict[str, str]
    models: NotRequired[dict[str, str]]


class WebhookPayload(TypedDict):
    """A webhook, without its secret; `events` is empty for all of them."""

    id: str
    object: Literal["webhook"]
    url: str
    events: list[EventType]
    enabled: bool
    disabled_reason: str | None
    created_at: float


class NewWebhookPayload(WebhookPayload):
    """A webhook that was just made: its secret is shown here and never again."""

    secret: str


class WebhookList(TypedDict):
    """A page of webhooks, newest first."""

    object: Literal["list"]
    data: list[WebhookPayload]
    has_more: bool
    next_after: str | None


class DeletedWebhook(TypedDict):
    """A webhook that is gone, with its deliveries."""

    id: str
    object: Literal["webhook"]
    deleted: Literal[True]


class DeliveryPayload(TypedDict):
    """An event on its way to a webhook, and what came of the last attempt."""

    id: str
    object: Literal["webhook.delivery"]
    webhook_id: str
    event_id: str
    type: EventType
    job_id: str
    state: DeliveryState
    attempts: int
    next_at: float | None
    last_status: int | None
    last_reason: str | None
    created_at: float
    attempted_at: float | None
    ended_at: float | None


class DeliveryList(TypedDict):
    """A page of deliveries, newest first."""

    object: Literal["list"]
    data: list[DeliveryPayload]
    has_more: bool
    next_after: str | None
