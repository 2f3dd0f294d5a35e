"""Events that a deployment announces, and the records of those who are told of them.

An event says that a job or a batch is over, or that a schedule is failing. Its body has OpenAI's
shape, with counts: never a prompt or an answer.
"""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Literal

from typing_extensions import TypedDict

from nightjar.jobs.errors import LifecycleError
from nightjar.jobs.states import JobState


class Subject(StrEnum):
    """What a job is to its caller."""

    JOB = "job"
    BATCH = "batch"


class DeliveryState(StrEnum):
    """Where the delivery of an event to a webhook stands."""

    WAITING = "waiting"  # to be sent, now or after a failure
    DELIVERED = "delivered"
    FAILED = "failed"  # given up; it can be sent again by hand


class EventType(StrEnum):
    """Every event that exists."""

    JOB_COMPLETED = "job.completed"
    JOB_FAILED = "job.failed"
    JOB_EXPIRED = "job.expired"
    JOB_CANCELLED = "job.cancelled"
    BATCH_COMPLETED = "batch.completed"
    BATCH_FAILED = "batch.failed"
    BATCH_EXPIRED = "batch.expired"
    BATCH_CANCELLED = "batch.cancelled"
    SCHEDULE_FAILING = "schedule.failing"


class EventCounts(TypedDict):
    """Rows of the job or batch by outcome."""

    total: int
    completed: int
    failed: int
    cancelled: int


class EventData(TypedDict):
    """What the event is about: the id of the job, batch or schedule, and its rows.

    Of a schedule they are the rows of its last run.
    """

    id: str
    counts: EventCounts


class EventPayload(TypedDict):
    """The body of an event as it is sent; `created_at` is in seconds since 1970."""

    id: str
    object: Literal["event"]
    created_at: int
    type: EventType
    data: EventData


_ENDS = {
    JobState.COMPLETED: "completed",
    JobState.COMPLETED_WITH_FAILURES: "completed",
    JobState.FAILED: "failed",
    JobState.EXPIRED: "expired",
    JobState.CANCELLED: "cancelled",
}


def end_event(subject: Subject, state: JobState) -> EventType:
    """The event of a job or batch that ends in this state; raises LifecycleError if it does not.

    A batch of which every row failed is `batch.completed`, as its status is `completed`.
    `batch.failed` is for a batch whose file cannot be used at all.
    """
    if state not in _ENDS:
        raise LifecycleError(f"{state.value!r} is no end of a job")
    if subject is Subject.BATCH and state is JobState.FAILED:
        return EventType.BATCH_COMPLETED
    return EventType(f"{subject.value}.{_ENDS[state]}")


def event_body(
    event_id: str, kind: EventType, created_at: datetime, about: str, counts: EventCounts
) -> str:
    """The JSON text of an event; `about` is the id of the job, batch or schedule."""
    body: EventPayload = {
        "id": event_id,
        "object": "event",
        "created_at": int(created_at.timestamp()),
        "type": kind,
        "data": {"id": about, "counts": counts},
    }
    return json.dumps(body, separators=(",", ":"))


def new_id(prefix: str) -> str:
    """An id that sorts by creation and that nobody can guess."""
    return f"{oldest_id(prefix, time.time_ns() // 1_000_000)}{secrets.token_hex(8)}"


def oldest_id(prefix: str, moment_ms: int) -> str:
    """What every id sorts behind that was made at this moment or later."""
    return f"{prefix}_{moment_ms:012x}"


@dataclass(frozen=True, slots=True)
class NewWebhook:
    """Where events of a tenant are to be sent; filled by the API."""

    tenant: str
    url: str
    events: Sequence[EventType]  # empty: all
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Webhook:
    """A webhook as its tenant sees it: without the secret."""

    id: str
    url: str
    events: Sequence[EventType]
    enabled: bool
    disabled_reason: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event on its way to a webhook, as its tenant sees it."""

    id: str
    webhook_id: str
    event_id: str
    type: EventType
    job_id: str
    state: DeliveryState
    attempts: int
    next_at: datetime | None  # while it waits
    last_status: int | None  # HTTP status of the last attempt; None without an answer
    last_reason: str | None  # why the last attempt failed
    created_at: datetime
    attempted_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class ClaimedDelivery:
    """A delivery that this process sends now; `attempts` fences it."""

    id: str
    webhook_id: str
    event_id: str
    url: str
    secret: str = field(repr=False)
    body: str
    attempts: int  # this one included
    failures: int  # of the attempts before, since it was made or redelivered by hand


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of sending an event once; filled by the sender."""

    status: int | None  # None without an answer
    reason: str | None = None  # why it failed; None if the receiver took it
    retry_after_s: float | None = None  # the receiver asked to be left alone for so long

    @property
    def delivered(self) -> bool:
        """Whether the receiver took it."""
        return self.reason is None
