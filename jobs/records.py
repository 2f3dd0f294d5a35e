"""The typed records that pass between the store and its callers.

`New...` records are filled by whoever creates the thing; the others are filled
by the store alone, from its rows. Those of which there is one a request are
msgspec's structs, which are made in a fifth of the time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from nightjar.jobs.states import JobState, RequestKind, Reuse
from nightjar.jobs.tracing import current_traceparent

# A validated and normalised request body, or the body of an answer: plain JSON values.
JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RequestError:
    """Why one request failed; `param` names the field at fault, such as `body.stop`."""

    code: str
    message: str
    param: str | None = None


# A job of priority p goes before those that came up to p times so many seconds earlier. All jobs
# age alike, so that bulk work yields to urgent jobs and still ends.
AGEING_S = 3_600.0


# Whose the jobs are where nobody is named: on a machine of one user, and before there were tenants.
DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class JobLimits:
    """How many rows a job may have, and how many of them may be rejected; None for any number."""

    rows: int | None = None
    rejected: int | None = None


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be created; filled by the submitter."""

    model: str
    idempotency_key: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    completion_window_s: float | None = None  # what is not computed by then expires
    priority: int = 0  # each step is worth AGEING_S of waiting
    merge_equal: bool = True  # equal requests are computed once
    limits: JobLimits = JobLimits()
    tenant: str = DEFAULT_TENANT
    names_model: bool = False  # no other model may compute it
    id: str | None = None  # given beforehand: of the batch that the job is
    created_at: datetime | None = None  # when the batch was made
    # Its rows are purged so long after its end, or sooner where its tenant or the deployment keeps
    # less; None: as those say. Of whoever submits: a client, a batch, a schedule to come.
    keep_results_s: int | None = None
    traceparent: str | None = field(default_factory=current_traceparent)


@dataclass(frozen=True, slots=True)
class Job:
    """A job and its counters; filled by the store."""

    id: str
    state: JobState
    model: str
    total: int
    completed: int
    failed: int
    cancelled: int  # not computed: the job was cancelled, or expired
    cancel_requested: bool  # to be stopped, by somebody or by its deadline
    expired: bool  # by its deadline
    prompt_tokens: int
    completion_tokens: int
    requested_tokens: int  # sum of max_tokens over the finished requests
    saved_tokens: int  # requested but not generated, because a stop came first
    metadata: Mapping[str, str]
    created_at: datetime
    started_at: datetime | None  # the first claim
    finished_at: datetime | None  # the last outcome
    expires_at: datetime | None
    priority: int
    reused: int  # of `completed`: not computed for their own sake, see Reuse
    reused_tokens: int  # the prompt and completion tokens of those
    tenant: str
    keep_results_s: int | None = None  # as its submitter asked
    purged_at: datetime | None = None  # since then its requests and results are gone
    takes_rows: bool = False  # it is open: it may get more rows

    @property
    def ended(self) -> int:
        """Requests that have their outcome."""
        return self.completed + self.failed + self.cancelled

    @property
    def is_over(self) -> bool:
        """Whether no request is without outcome."""
        return self.finished_at is not None


class NewRequest(msgspec.Struct, frozen=True):
    """An accepted batch line; filled by jobs/lines/parsing.py."""

    index: int  # order among the job's rows, from 0
    line: int  # line of the file, from 1
    custom_id: str
    kind: RequestKind
    body: JsonObject


class RejectedRow(msgspec.Struct, frozen=True):
    """A batch line that never becomes a request; filled by jobs/lines/parsing.py."""

    index: int
    line: int
    custom_id: str | None  # kept whenever it could be read
    code: str
    message: str
    param: str | None = None


class QueuedRequest(msgspec.Struct, frozen=True):
    """A request that waits to be planned."""

    id: int
    job_id: str
    index: int
    custom_id: str
    kind: RequestKind
    body: JsonObject
    size: int = 0  # bytes of its body as stored


@dataclass(frozen=True, slots=True)
class JobToPlan:
    """A job that has queued requests; filled by the store."""

    id: str
    model: str
    failures: int  # chunks that could not be planned since one could
    error: str | None  # why not the last
    tenant: str = DEFAULT_TENANT
    weight: float = 1.0  # of the tenant
    overtakes: bool = False  # the jobs of other tenants, whatever their shares
    live: bool = False  # a single call


@dataclass(frozen=True, slots=True)
class PlanningRange:
    """Rows of a job that one planner plans: from `first` to the one before `end`.

    is_lowest: No other planner plans an earlier row of the job, so that a row that kills its
    planner is in the lowest range of its job sooner or later.
    """

    job_id: str
    first: int
    end: int
    is_lowest: bool


class EncodedRequest(msgspec.Struct, frozen=True):
    """A request's token ids: [prompt], or [query, document, document...]; filled by the planner."""

    id: int
    segments: Sequence[Sequence[int]]
    prompt_vector: str | None = None  # "name@version", resolved when planned
    vector_reference: str | None = None  # what the request wrote, which the job keeps so
    adapter: str | None = None  # of a LoRA adapter, as above
    adapter_reference: str | None = None
    # As `asked.without_texts` gives it. None: workers read the whole body.
    asked: JsonObject | None = None


@dataclass(frozen=True, slots=True)
class NewMicroBatch:
    """Requests to be computed together; filled by the planner."""

    kind: RequestKind
    bucket: int  # upper length of the bucket in tokens
    request_ids: Sequence[int]
    tokens: int


@dataclass(frozen=True, slots=True)
class MicroBatchRef:
    """What a message in the broker says of a micro-batch, and what Flower shows of it."""

    id: int
    epoch: int  # raised whenever a lease is taken back; an older epoch's work is thrown away
    job_id: str
    kind: RequestKind
    bucket: int
    size: int
    tokens: int
    isolated: bool = False  # suspects: nothing else is computed beside them
    fingerprint: str = ""  # of the model that it was planned for; "": by a version before 0013
    live: bool = False  # of a single call
    urgent: bool = False  # its job has a priority; `dispatchable` alone says so


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A single call's token ids and micro-batch, before either has an id."""

    encoded: EncodedRequest
    micro_batch: NewMicroBatch
    fingerprint: str


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """How a single call has ended. Exactly one of body and error is set."""

    job_id: str
    status_code: int
    body: JsonObject | None
    error: RequestError | None


class ClaimedRequest(msgspec.Struct, frozen=True):
    """A request of a claimed micro-batch, with the token ids of its planning.

    body: as it was asked, or what `asked.without_texts` leaves of it.
    """

    id: int
    index: int
    custom_id: str
    kind: RequestKind
    body: JsonObject
    segments: list[list[int]]
    prompt_vector: str | None = None  # "name@version", as planned
    adapter: str | None = None  # the same of a LoRA adapter


@dataclass(frozen=True, slots=True)
class ClaimedMicroBatch:
    """A lease: this owner, at this epoch, computes these requests."""

    id: int
    epoch: int
    job_id: str
    kind: RequestKind
    bucket: int
    size: int
    tokens: int
    isolated: bool
    fingerprint: str  # of the model that it was planned for
    live: bool  # of a single call
    attempts: int  # claims so far, this one included
    crashes: int  # crashes while its only request was computed alone
    requests: list[ClaimedRequest]


class NewResult(msgspec.Struct, frozen=True):
    """One request's outcome; filled by the worker. Exactly one of body and error is set."""

    request_id: int
    status_code: int
    body: JsonObject | None
    error: RequestError | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    requested_tokens: int = 0
    saved_tokens: int = 0
    finish_reason: str | None = None
    reused: Reuse | None = None

    @classmethod
    def failure(
        cls,
        request_id: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
    ) -> "NewResult":
        """The outcome of a request that failed."""
        return cls(request_id, status, None, RequestError(code, message, param))


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """A success that is kept for equal requests to come."""

    key: str  # 64 hexadecimal digits: of the model, the precision and what was asked
    body: JsonObject
    prompt_tokens: int
    completion_tokens: int
    requested_tokens: int
    saved_tokens: int
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class CachedScore:
    """How likely a document is after a query, kept for rankings to come."""

    key: str  # 64 hexadecimal digits: of the model, the precision, the query and the document
    mean_nll: float  # nats a token
    token_count: int  # tokens that were scored


@dataclass(frozen=True, slots=True)
class ResultRecord:
    """One landed outcome, as read back."""

    id: int  # the request's id
    index: int
    line: int
    custom_id: str | None
    status_code: int
    body: JsonObject | None
    error: RequestError | None
    prompt_tokens: int
    completion_tokens: int
    requested_tokens: int
    saved_tokens: int
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class ResultPage:
    """Landed outcomes, and how to ask on."""

    records: list[ResultRecord]
    next_after: int  # ask on behind this: a row's index, or a place in the order of landing
    has_more: bool  # more has landed, and can be asked for at once
    complete: bool  # the job is over, and this page is the last
    waits_for_row: int | None = None  # in row order: the first row without outcome ends the page


def is_text(value: object, longest: int) -> bool:
    """Whether it is a text, not empty, that both databases can store."""
    if not isinstance(value, str) or not 0 < len(value) <= longest or "\x00" in value:
        return False
    return value.encode(errors="replace").decode() == value
