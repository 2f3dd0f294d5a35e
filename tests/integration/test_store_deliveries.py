"""Deliveries in the store: claimed, fenced, retried, sent again by hand, pruned."""

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from nightjar.jobs.errors import (
    LifecycleError,
    UnknownDeliveryError,
    UnknownWebhookError,
)
from nightjar.jobs.events import (
    Attempt,
    ClaimedDelivery,
    EventType,
)
from nightjar.jobs.store import Store, announcing
from tests.jobs import planned
from tests.outcomes import compute
from tests.webhooks import add, finished, of, take


def test_a_claim_is_a_lease(store: Store) -> None:
    """A process that died keeps the event for as long as the lease; then another one sends it."""
    add(store)
    finished(store)
    (first,) = store.deliveries.claim(8, -1.0)  # it has died, and its lease is over
    (second,) = take(store)
    assert take(store) == []
    assert (second.id, second.event_id, second.body) == (first.id, first.event_id, first.body)
    assert (first.attempts, second.attempts) == (1, 2)
    assert not store.deliveries.record(first, Attempt(500, "answered 500"), None), "it is fenced"
    assert store.deliveries.record(second, Attempt(200))
    assert not store.deliveries.record(second, Attempt(200))
    assert take(store) == []


def test_a_failure_waits_and_the_last_one_ends_it(store: Store) -> None:
    webhook = add(store)
    finished(store)
    (claimed,) = take(store)
    later = datetime.now(UTC) + timedelta(hours=1)
    assert store.deliveries.record(claimed, Attempt(503, "answered 503"), later)
    (delivery,) = of(store, webhook)
    assert (delivery.state, delivery.last_status) == ("waiting", 503)
    assert delivery.last_reason == "answered 503"
    assert abs((delivery.next_at or later) - later) < timedelta(seconds=1)
    assert take(store) == []
    store.deliveries.redeliver("default", delivery.id)
    (again,) = take(store)
    assert (again.attempts, again.failures) == (2, 0)
    assert store.deliveries.record(again, Attempt(None, "no connection"))
    (delivery,) = of(store, webhook)
    assert (delivery.state, delivery.next_at, delivery.last_status) == ("failed", None, None)
    assert delivery.ended_at is not None


def test_an_event_is_sent_again_by_hand_with_the_same_id(store: Store) -> None:
    webhook = add(store)
    finished(store)
    (first,) = take(store)
    store.deliveries.record(first, Attempt(200))
    again = store.deliveries.redeliver("default", first.id)
    assert (again.state, again.ended_at) == ("waiting", None)
    (second,) = take(store)
    assert (second.event_id, second.body) == (first.event_id, first.body)
    with pytest.raises(UnknownDeliveryError):
        store.deliveries.redeliver("stranger", first.id)
    store.webhooks.set_enabled("default", webhook.id, enabled=False)
    with pytest.raises(LifecycleError, match="switch it on"):
        store.deliveries.redeliver("default", first.id)


def test_a_webhook_with_many_deliveries_keeps_no_other_waiting(store: Store) -> None:
    crowded = add(store, EventType.JOB_COMPLETED)
    for _ in range(3):
        finished(store)
    quiet = add(store)
    finished(store)
    first = take(store)
    assert sorted(one.webhook_id for one in first) == sorted([crowded.id, quiet.id])
    assert [one.webhook_id for one in take(store, busy=(crowded.id,))] == []
    assert [one.webhook_id for one in take(store, most=1)] == [crowded.id]
    store.webhooks.set_enabled("default", crowded.id, enabled=False)
    assert take(store) == []


def test_two_processes_claim_each_delivery_once(store: Store) -> None:
    add(store)
    for _ in range(6):
        finished(store)
    taken: list[ClaimedDelivery] = []

    def work() -> None:
        while mine := take(store):
            taken.extend(mine)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken += take(store)
    assert len(taken) == len({one.id for one in taken}) == 6
    assert {one.attempts for one in taken} == {1}


def test_a_webhook_that_is_deleted_while_a_job_ends_does_not_undo_the_results(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion begins after the job's end has found the webhook, and before it writes."""
    webhook = add(store)
    job_id, (ref,) = planned(store, 1)
    name = "nightjar.jobs.store.announcing.event_body"
    real = announcing.event_body
    deleting = threading.Thread(target=store.webhooks.delete, args=("default", webhook.id))

    def meanwhile(*arguments: Any) -> str:
        deleting.start()
        deleting.join(0.5)
        return real(*arguments)

    monkeypatch.setattr(name, meanwhile)
    assert compute(store, ref)
    deleting.join()
    assert store.jobs.get(job_id).state == "completed"
    with pytest.raises(UnknownWebhookError):
        store.webhooks.get("default", webhook.id)
    assert of(store, webhook) == []


def test_old_deliveries_are_pruned(store: Store) -> None:
    webhook = add(store)
    for _ in range(2):
        finished(store)
    (done,) = take(store)
    store.deliveries.record(done, Attempt(200))
    (sending,) = take(store)
    moment = datetime.now(UTC)
    assert store.deliveries.prune(moment - timedelta(hours=1)) == 0
    assert store.deliveries.prune(moment + timedelta(seconds=5)) == 1
    assert [one.id for one in of(store, webhook)] == [sending.id]
    store.webhooks.set_enabled("default", webhook.id, enabled=False)
    assert store.deliveries.prune(moment + timedelta(days=30)) == 1, "nobody sends it any more"
