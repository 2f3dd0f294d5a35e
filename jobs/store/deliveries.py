"""Deliveries of events to webhooks: what is due, what came of each attempt, what can be seen.

To claim a delivery moves its next attempt behind the time that an attempt may take. So a process
that dies while it sends loses nothing: another one sends the same event again, with the same id.
The number of the attempt fences its outcome.
"""

from collections.abc import Collection
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import LifecycleError, UnknownDeliveryError
from nightjar.jobs.events import (
    Attempt,
    ClaimedDelivery,
    Delivery,
    DeliveryState,
    EventType,
    oldest_id,
)
from nightjar.jobs.store.common import AnyRow, now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.webhook_tables import webhook, webhook_delivery

PRUNED_PER_STEP = 1_000

_row = webhook_delivery.c
_FIELDS = [_row[name] for name in Delivery.__slots__]


class Deliveries:
    """What is on its way to webhooks."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, most: int, lease_s: float, busy: Collection[str] = ()) -> list[ClaimedDelivery]:
        """Claim due deliveries: the oldest of each of at most `most` webhooks, chosen by chance.

        So a webhook with many deliveries keeps no other one waiting. Those in `busy` are left out.
        A delivery is due again after `lease_s` seconds, unless its outcome is recorded before.
        """
        moment = now()
        is_due = sa.and_(
            _row.webhook_id == webhook.c.id, _row.next_at.is_not(None), _row.next_at <= moment
        )
        waiting = (
            sa.select(webhook.c.id, webhook.c.url, webhook.c.secret)
            .where(webhook.c.enabled, webhook.c.id.not_in(busy), sa.exists().where(is_due))
            .order_by(sa.func.random())
            .limit(most)
        )
        with self._database.reading() as connection:  # most calls find none, and need no lock
            found = connection.execute(waiting).all()
        if not found:
            return []

        def work(connection: Connection) -> list[ClaimedDelivery]:
            claimed = (_claim(connection, one, moment, lease_s) for one in found)
            return [one for one in claimed if one is not None]

        # A claim that a power cut undoes is made again.
        return self._database.write(work, durable=False)

    def record(
        self, claimed: ClaimedDelivery, attempt: Attempt, retry_at: datetime | None = None
    ) -> bool:
        """Record what came of an attempt; False if the delivery was claimed again since.

        `retry_at` is when a failed one is sent again; without it, the delivery has failed.
        """
        values: dict[str, object] = {
            "last_status": attempt.status,
            "last_reason": attempt.reason,
            "attempted_at": now(),
        }
        if attempt.delivered:
            values |= {"state": DeliveryState.DELIVERED, "next_at": None, "ended_at": now()}
        elif retry_at is not None:
            values |= {"failures": _row.failures + 1, "next_at": retry_at}
        else:
            values |= {"failures": _row.failures + 1, "state": DeliveryState.FAILED}
            values |= {"next_at": None, "ended_at": now()}
        statement = (
            sa.update(webhook_delivery)
            .where(_row.id == claimed.id, _row.attempts == claimed.attempts, *_WAITS)
            .values(values)
        )
        # An outcome that a power cut undoes is found again by a further attempt.
        return self._database.write(
            lambda connection: _changes(connection, statement), durable=False
        )

    def disable(self, webhook_id: str, reason: str) -> None:
        """Switch a webhook off, whose receiver wants no more."""
        statement = sa.update(webhook).where(webhook.c.id == webhook_id)
        statement = statement.values(enabled=False, disabled_reason=reason)
        self._database.write(lambda connection: connection.execute(statement))

    def newest(self, webhook_id: str, limit: int, after: str | None = None) -> list[Delivery]:
        """Deliveries to a webhook, newest first; `after` is the last one of the page before."""
        found = sa.select(*_FIELDS).where(_row.webhook_id == webhook_id)
        if after is not None:
            found = found.where(_row.id < after)
        with self._database.reading() as connection:
            rows = connection.execute(found.order_by(_row.id.desc()).limit(limit)).all()
        return [_record(row) for row in rows]

    def redeliver(self, tenant: str, delivery_id: str) -> Delivery:
        """Send an event again now, with a new budget of attempts.

        Raises UnknownDeliveryError, and LifecycleError where the webhook is switched off.
        """
        own = (
            sa.select(webhook.c.enabled)
            .join(webhook_delivery, _row.webhook_id == webhook.c.id)
            .where(_row.id == delivery_id, webhook.c.tenant == tenant)
        )
        again = (
            sa.update(webhook_delivery)
            .where(_row.id == delivery_id)
            .values(state=DeliveryState.WAITING, failures=0, next_at=now(), ended_at=None)
            .returning(*_FIELDS)
        )

        def work(connection: Connection) -> AnyRow:
            enabled = connection.execute(own).scalar_one_or_none()
            if enabled is None:
                raise UnknownDeliveryError(delivery_id)
            if not enabled:
                raise LifecycleError("the webhook is switched off; switch it on first")
            return connection.execute(again).one()

        return _record(self._database.write(work))

    def prune(self, before: datetime) -> int:
        """Delete some deliveries that were made before a moment; gives how many.

        Of those that wait, only the ones of webhooks that are switched off have waited so long.
        """
        made_before = _row.id < oldest_id("whd", int(before.timestamp() * 1_000))
        is_idle = sa.or_(_row.next_at.is_(None), _row.next_at < before)
        oldest = (
            sa.select(_row.id).where(made_before, is_idle).order_by(_row.id).limit(PRUNED_PER_STEP)
        )
        with self._database.reading() as connection:
            ids = list(connection.scalars(oldest))
        if not ids:
            return 0
        drop = sa.delete(webhook_delivery).where(_row.id.in_(ids), is_idle)
        return self._database.write(lambda connection: connection.execute(drop).rowcount)


_WAITS = (_row.state == DeliveryState.WAITING, _row.next_at.is_not(None))


def _changes(connection: Connection, statement: sa.Update) -> bool:
    return connection.execute(statement).rowcount > 0


def _claim(
    connection: Connection, receiver: AnyRow, moment: datetime, lease_s: float
) -> ClaimedDelivery | None:
    first = (
        sa.select(_row.id)
        .where(_row.webhook_id == receiver.id, _row.next_at.is_not(None), _row.next_at <= moment)
        .order_by(_row.next_at)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    delivery_id = connection.scalar(first)
    if delivery_id is None:
        return None
    claimed = connection.execute(
        sa.update(webhook_delivery)
        .where(_row.id == delivery_id)
        .values(attempts=_row.attempts + 1, next_at=moment + timedelta(seconds=lease_s))
        .returning(_row.event_id, _row.body, _row.attempts, _row.failures)
    ).one()
    return ClaimedDelivery(
        delivery_id,
        receiver.id,
        claimed.event_id,
        receiver.url,
        receiver.secret,
        claimed.body,
        claimed.attempts,
        claimed.failures,
    )


def _record(row: AnyRow) -> Delivery:
    values = dict(row._mapping)
    values["type"] = EventType(values["type"])
    return Delivery(**values)
