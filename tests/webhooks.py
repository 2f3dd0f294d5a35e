"""Webhooks in a real store, jobs that end, and what is then on its way."""

from nightjar.jobs.events import ClaimedDelivery, Delivery, EventType, NewWebhook, Webhook
from nightjar.jobs.store import Store
from tests.jobs import planned
from tests.outcomes import compute

LEASE_S = 60.0
SECRET = "whsec_c2VjcmV0"


def add(store: Store, *events: EventType, tenant: str = "default") -> Webhook:
    return store.webhooks.add(NewWebhook(tenant, "https://a.example/", events, SECRET))


def finished(store: Store, rows: int = 1) -> str:
    job_id, refs = planned(store, rows)
    for ref in refs:
        compute(store, ref)
    return job_id


def of(store: Store, webhook: Webhook) -> list[Delivery]:
    return store.deliveries.newest(webhook.id, 100)


def take(store: Store, most: int = 8, busy: tuple[str, ...] = ()) -> list[ClaimedDelivery]:
    return store.deliveries.claim(most, LEASE_S, busy)
