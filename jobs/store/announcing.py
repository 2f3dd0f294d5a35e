"""Announces the end of a job: writes its event for each webhook of its tenant.

The event is part of the transaction that ends the job, so none is lost and none comes too early.
The statement that ends the job also returns whether a webhook wants to know of it (`IS_AWAITED`).
So a job whose tenant has no webhook costs no further statement.
"""

import json

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.events import (
    DeliveryState,
    EventCounts,
    EventType,
    Subject,
    end_event,
    event_body,
    new_id,
)
from nightjar.jobs.store.common import now
from nightjar.jobs.store.tables import job
from nightjar.jobs.store.webhook_tables import webhook, webhook_delivery

# Not job.c.tenant: SQLAlchemy would read the whole table of jobs beside the row that is changed.
_TENANT = sa.literal_column("job.tenant", sa.String)
IS_AWAITED = sa.exists().where(webhook.c.tenant == _TENANT, webhook.c.enabled).label("is_awaited")
"""For RETURNING of the statement that ends a job: whether a webhook waits for its end."""


def announce_end(connection: Connection, job_id: str) -> None:
    """Write the event of a job that has just ended, for each webhook that asks for such events."""
    row = job.c
    columns = (row.state, row.tenant, row.total, row.completed, row.failed, row.cancelled)
    ended = connection.execute(sa.select(*columns).where(row.id == job_id)).one()
    kind = end_event(Subject.JOB, ended.state)
    counts: EventCounts = {
        "total": ended.total,
        "completed": ended.completed,
        "failed": ended.failed,
        "cancelled": ended.cancelled,
    }
    announce(connection, ended.tenant, kind, job_id, job_id, counts)


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


def _asks_for(events: str, kind: EventType) -> bool:
    asked = json.loads(events)
    return not asked or kind.value in asked
