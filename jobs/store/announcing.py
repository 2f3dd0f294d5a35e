"""Announces the end of a job or batch: writes its event for each webhook of its tenant.

The event is part of the transaction that ends the job, so none is lost and none comes too early.
The statement that ends the job also returns whether a webhook wants to know of it (`IS_AWAITED`).
So a job whose tenant has no webhook costs no further statement.

A single call has no event: its caller waits for the answer. A batch ends later than its job, when
its result files exist, and only that end is announced.
"""

import json

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.batch_records import batch_id_of
from nightjar.jobs.events import (
    DeliveryState,
    EventCounts,
    EventType,
    Subject,
    end_event,
    event_body,
    new_id,
)
from nightjar.jobs.states import JobState
from nightjar.jobs.store.batch_tables import batch
from nightjar.jobs.store.common import AnyRow, now
from nightjar.jobs.store.tables import job
from nightjar.jobs.store.webhook_tables import webhook, webhook_delivery

# Not job.c.id: SQLAlchemy would read the whole table of jobs beside the row that is changed.
_JOB_ID = sa.literal_column("job.id", sa.String)
_TENANT = sa.literal_column("job.tenant", sa.String)
_LIVE = sa.literal_column("job.live", sa.Boolean)
IS_AWAITED = sa.and_(
    sa.not_(_LIVE),
    sa.exists().where(webhook.c.tenant == _TENANT, webhook.c.enabled),
    sa.not_(sa.exists().where(batch.c.job_id == _JOB_ID)),
).label("is_awaited")
"""For RETURNING of the statement that ends a job: whether a webhook waits for its end."""

_TENANT_OF_BATCH = sa.literal_column("batch.tenant", sa.String)
BATCH_IS_AWAITED = (
    sa.exists().where(webhook.c.tenant == _TENANT_OF_BATCH, webhook.c.enabled).label("is_awaited")
)
"""The same for RETURNING of the statement that ends a batch."""

_ENDED = sa.select(
    job.c.state, job.c.tenant, job.c.total, job.c.completed, job.c.failed, job.c.cancelled
).where(job.c.id == sa.bindparam("job"))
_NO_ROWS: EventCounts = {"total": 0, "completed": 0, "failed": 0, "cancelled": 0}


def announce_end(connection: Connection, job_id: str) -> None:
    """Write the event of a job that has just ended, for each webhook that asks for such events."""
    ended = connection.execute(_ENDED, {"job": job_id}).one()
    kind = end_event(Subject.JOB, ended.state)
    announce(connection, ended.tenant, kind, job_id, job_id, _counts(ended))


def announce_batch(connection: Connection, job_id: str) -> None:
    """Write the event of a batch whose result files have just been made."""
    ended = connection.execute(_ENDED, {"job": job_id}).one()
    kind = end_event(Subject.BATCH, ended.state)
    announce(connection, ended.tenant, kind, job_id, batch_id_of(job_id), _counts(ended))


def announce_unread_batch(
    connection: Connection, tenant: str, job_id: str, *, cancelled: bool
) -> None:
    """Write the event of a batch without rows: it was cancelled, or its file cannot be used."""
    is_cancelled = end_event(Subject.BATCH, JobState.CANCELLED)
    kind = is_cancelled if cancelled else EventType.BATCH_FAILED
    announce(connection, tenant, kind, job_id, batch_id_of(job_id), _NO_ROWS)


def announce(
    connection: Connection,
    tenant: str,
    kind: EventType,
    job_id: str,
    about: str,
    counts: EventCounts,
) -> None:
    """Write an event for each webhook of the tenant that asks for its kind.

    `about` is the id that the caller knows: of the job, or of the batch that is this job.
    """
    # The lock keeps the webhooks from being deleted before the rows that refer to them are there.
    found = connection.execute(
        sa.select(webhook.c.id, webhook.c.events)
        .where(webhook.c.tenant == tenant, webhook.c.enabled)
        .order_by(webhook.c.id)
        .with_for_update(read=True, key_share=True)
    ).all()
    wanted = [row.id for row in found if _asks_for(row.events, kind)]
    if not wanted:
        return
    event_id, moment = new_id("evt"), now()
    event = {
        "event_id": event_id,
        "type": kind.value,
        "job_id": job_id,
        "body": event_body(event_id, kind, moment, about, counts),
        "state": DeliveryState.WAITING,
        "attempts": 0,
        "failures": 0,
        "next_at": moment,
        "created_at": moment,
    }
    rows = [event | {"id": new_id("whd"), "webhook_id": webhook_id} for webhook_id in wanted]
    connection.execute(sa.insert(webhook_delivery), rows)


def _counts(ended: AnyRow) -> EventCounts:
    return {
        "total": ended.total,
        "completed": ended.completed,
        "failed": ended.failed,
        "cancelled": ended.cancelled,
    }


def _asks_for(events: str, kind: EventType) -> bool:
    asked = json.loads(events)
    return not asked or kind.value in asked
