"""Webhooks: where the events of a tenant are sent. A tenant reaches only its own."""

import json

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import TooManyWebhooksError, UnknownWebhookError
from nightjar.jobs.events import EventType, NewWebhook, Webhook, new_id
from nightjar.jobs.store.common import AnyRow, now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.webhook_tables import webhook, webhook_delivery

MOST_OF_TENANT = 16
DELETED_PER_STEP = 1_000

_FIELDS = [webhook.c[name] for name in Webhook.__slots__]


class Webhooks:
    """Makes, lists, switches and deletes webhooks."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, new: NewWebhook) -> Webhook:
        """Store a webhook; raises TooManyWebhooksError where the tenant has MOST_OF_TENANT."""
        values = {
            "id": new_id("wh"),
            "tenant": new.tenant,
            "url": new.url,
            "secret": new.secret,
            "events": json.dumps([kind.value for kind in new.events]),
            "enabled": True,
            "created_at": now(),
        }
        own = sa.select(sa.func.count()).where(webhook.c.tenant == new.tenant)

        def work(connection: Connection) -> Webhook:
            # Two calls at once may pass the limit together, by as many as there are of them.
            if connection.execute(own).scalar_one() >= MOST_OF_TENANT:
                raise TooManyWebhooksError(MOST_OF_TENANT)
            inserted = sa.insert(webhook).values(values).returning(*_FIELDS)
            return _record(connection.execute(inserted).one())

        return self._database.write(work)

    def newest(self, tenant: str, limit: int, after: str | None = None) -> list[Webhook]:
        """Webhooks, newest first; `after` is the id of the last one of the page before."""
        found = sa.select(*_FIELDS).where(webhook.c.tenant == tenant)
        if after is not None:
            found = found.where(webhook.c.id < after)
        with self._database.reading() as connection:
            rows = connection.execute(found.order_by(webhook.c.id.desc()).limit(limit))
            return [_record(row) for row in rows]

    def get(self, tenant: str, webhook_id: str) -> Webhook:
        """The webhook; raises UnknownWebhookError."""
        statement = sa.select(*_FIELDS).where(*_owned(tenant, webhook_id))
        with self._database.reading() as connection:
            row = connection.execute(statement).one_or_none()
        if row is None:
            raise UnknownWebhookError(webhook_id)
        return _record(row)

    def set_enabled(self, tenant: str, webhook_id: str, *, enabled: bool) -> Webhook:
        """Switch a webhook on or off; raises UnknownWebhookError.

        While it is off, no events are written for it, and what waits is not sent.
        """
        statement = (
            sa.update(webhook)
            .where(*_owned(tenant, webhook_id))
            .values(enabled=enabled, disabled_reason=None if enabled else "switched off by hand")
            .returning(*_FIELDS)
        )
        row = self._database.write(lambda connection: connection.execute(statement).one_or_none())
        if row is None:
            raise UnknownWebhookError(webhook_id)
        return _record(row)

    def delete(self, tenant: str, webhook_id: str) -> None:
        """Delete a webhook and its deliveries; raises UnknownWebhookError."""
        self.set_enabled(tenant, webhook_id, enabled=False)  # so that no more events come
        some = (
            sa.select(webhook_delivery.c.id)
            .where(webhook_delivery.c.webhook_id == webhook_id)
            .order_by(webhook_delivery.c.id)
            .limit(DELETED_PER_STEP)
        )
        step = sa.delete(webhook_delivery).where(webhook_delivery.c.id.in_(some))
        while self._database.write(lambda connection: connection.execute(step).rowcount):
            pass
        # The foreign key takes a delivery with it that was written meanwhile.
        last = sa.delete(webhook).where(*_owned(tenant, webhook_id))
        self._database.write(lambda connection: connection.execute(last))


def _owned(tenant: str, webhook_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (webhook.c.id == webhook_id, webhook.c.tenant == tenant)


def _record(row: AnyRow) -> Webhook:
    values = dict(row._mapping)
    values["events"] = tuple(EventType(name) for name in json.loads(values["events"]))
    return Webhook(**values)
