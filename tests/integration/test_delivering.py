"""Delivering events: bounded, retried, and not lost with a process."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from nightjar.jobs.events import Attempt, ClaimedDelivery, NewWebhook, Webhook
from nightjar.jobs.store import Store
from nightjar.jobs.store.common import now
from nightjar.jobs.store.webhook_tables import webhook_delivery
from nightjar.jobs.webhooks.addresses import AddressGuard
from nightjar.jobs.webhooks.sender import WebhookSender
from nightjar.jobs.webhooks.signature import new_secret
from nightjar.pipeline.queue.delivering import (
    LONGEST_PAUSE_S,
    MOST_ATTEMPTS,
    PLACES_OF_ONE,
    Delivering,
    pause_s,
)
from tests.jobs import planned
from tests.outcomes import compute
from tests.processes import wait_until
from tests.receivers import answer_status, receiving


@pytest.fixture
def store(sqlite_tables: str) -> Iterator[Store]:
    opened = Store(sqlite_tables)
    yield opened
    opened.close()


def add(store: Store, url: str) -> Webhook:
    return store.webhooks.add(NewWebhook("default", url, (), new_secret()))


def finish_job(store: Store) -> str:
    job_id, (ref,) = planned(store, 1)
    compute(store, ref)
    return job_id


def send(claimed: ClaimedDelivery) -> Attempt:
    return WebhookSender(AddressGuard(allow_private=True), timeout_s=5).send(claimed)


@contextmanager
def delivering(
    store: Store, send: Callable[[ClaimedDelivery], Attempt], **options: float
) -> Iterator[Delivering]:
    opened = Delivering(store.deliveries, send, **{"keep_days": 30, "idle_s": 1.0, **options})
    yield opened
    opened.close()


def states(store: Store, webhook: Webhook) -> list[str]:
    return [one.state.value for one in store.deliveries.newest(webhook.id, 100)]


def test_an_event_arrives_once(store: Store) -> None:
    with receiving() as receiver, delivering(store, send) as pass_:
        webhook = add(store, receiver.url)
        assert pass_.step() == 1.0, "nothing is due"
        finish_job(store)
        assert pass_.step() == 0.0, "there may be more"
        wait_until("the delivery", lambda: states(store, webhook) == ["delivered"], 10)
        pass_.step()
        time.sleep(0.1)
        assert len(receiver.received) == 1


def test_a_slow_receiver_holds_two_places_and_no_pass(store: Store) -> None:
    release = threading.Event()

    def slow(claimed: ClaimedDelivery) -> Attempt:
        if claimed.url.startswith("http://slow"):
            assert release.wait(10)
        return Attempt(200)

    slow_one, quick = add(store, "http://slow.example/"), add(store, "http://quick.example/")
    with delivering(store, slow) as pass_:
        for _ in range(5):
            finish_job(store)
        began = time.monotonic()

        def all_quick() -> bool:
            pass_.step()
            return states(store, quick) == ["delivered"] * 5

        wait_until("the quick receiver", all_quick, 10)
        assert time.monotonic() - began < 5
        attempts = [one.attempts for one in store.deliveries.newest(slow_one.id, 9)]
        assert sum(attempts) == PLACES_OF_ONE
        release.set()
        wait_until(
            "the rest", lambda: pass_.step() == 1.0 and "waiting" not in states(store, slow_one)
        )


def test_a_failing_receiver_is_tried_again_later_and_given_up_at_last(store: Store) -> None:
    with receiving(answer_status(500)) as receiver, delivering(store, send) as pass_:
        webhook = add(store, receiver.url)
        finish_job(store)
        pauses = []
        for attempt in range(1, MOST_ATTEMPTS + 1):
            pass_.step()
            wait_until("the attempt", lambda n=attempt: len(receiver.received) == n, 10)
            wait_until("its outcome", lambda: _latest(store, webhook)[0] is not None, 10)
            reason, state, pause = _latest(store, webhook)
            assert reason == "answered 500"
            if state == "failed":
                break
            pauses.append(pause)
            _make_due(store)
        assert state == "failed"
        assert len(receiver.received) == MOST_ATTEMPTS
        assert len({one.headers["webhook-id"] for one in receiver.received}) == 1
        assert len(set(receiver.bodies())) == 1
        assert pauses[:7] == sorted(pauses[:7])
        assert max(pauses) < 1.3 * LONGEST_PAUSE_S


def _latest(store: Store, webhook: Webhook) -> tuple[str | None, str, float]:
    """Its reason once its outcome is recorded: then the next attempt is not behind the lease."""
    (one,) = store.deliveries.newest(webhook.id, 1)
    if one.attempted_at is None or (one.next_at and one.next_at < one.attempted_at):
        return None, one.state.value, 0.0
    pause = (one.next_at - one.attempted_at).total_seconds() if one.next_at else 0.0
    return one.last_reason, one.state.value, pause


def _make_due(store: Store) -> None:
    due = sa.update(webhook_delivery).values(next_at=now(), attempted_at=None)
    store.database.write(lambda connection: connection.execute(due))


def test_a_receiver_that_is_gone_switches_its_webhook_off(store: Store) -> None:
    with receiving(answer_status(410)) as receiver, delivering(store, send) as pass_:
        webhook = add(store, receiver.url)
        finish_job(store)
        pass_.step()
        wait_until("the end", lambda: states(store, webhook) == ["failed"], 10)
        wait_until("the switch", lambda: not store.webhooks.get("default", webhook.id).enabled, 10)
        reason = store.webhooks.get("default", webhook.id).disabled_reason
        assert reason == "the receiver answered 410"


def test_a_sender_that_breaks_is_a_failed_attempt(store: Store) -> None:
    def broken(claimed: ClaimedDelivery) -> Attempt:
        raise ZeroDivisionError

    with delivering(store, broken) as pass_:
        webhook = add(store, "https://a.example/")
        finish_job(store)
        pass_.step()
        wait_until("the outcome", lambda: _latest(store, webhook)[0] is not None, 10)
        assert _latest(store, webhook)[0] == "it cannot be sent: ZeroDivisionError"


def test_pauses_grow_with_jitter_to_a_day_in_all() -> None:
    middle = [pause_s(failures, draw=lambda: 0.5) for failures in range(1, MOST_ATTEMPTS)]
    assert middle[:4] == [5.0, 20.0, 80.0, 320.0]
    assert max(middle) == LONGEST_PAUSE_S
    assert 20 * 3_600 < sum(middle) < 28 * 3_600
    assert (pause_s(1, draw=lambda: 0.0), pause_s(1, draw=lambda: 1.0)) == pytest.approx((4, 6))
    assert pause_s(10_000) < 2 * LONGEST_PAUSE_S


SENDING_PROCESS = """
import sys, time
from nightjar.jobs.store import Store
from nightjar.jobs.webhooks.addresses import AddressGuard
from nightjar.jobs.webhooks.sender import WebhookSender
from nightjar.pipeline.queue.delivering import Delivering
store = Store(sys.argv[1])
sender = WebhookSender(AddressGuard(allow_private=True), timeout_s=30)
delivering = Delivering(store.deliveries, sender.send, keep_days=30, idle_s=1, lease_s=1.0)
delivering.step()
time.sleep(60)
"""


def test_a_process_that_is_killed_while_it_sends_loses_no_event(
    store: Store, sqlite_url: str
) -> None:
    """Another one sends it again, with the same id, so that the receiver knows it."""
    with receiving(lambda handler: time.sleep(30)) as receiver:
        webhook = add(store, receiver.url)
        finish_job(store)
        process = subprocess.Popen(
            [sys.executable, "-c", SENDING_PROCESS, sqlite_url], cwd=Path(__file__).parents[2]
        )
        try:
            wait_until("the first attempt", lambda: receiver.received, 30)
        finally:
            process.kill()
            process.wait()
        receiver.answer = answer_status(204, b"")
        assert states(store, webhook) == ["waiting"]
        with delivering(store, send) as pass_:
            wait_until(
                "the second attempt",
                lambda: pass_.step() is not None and states(store, webhook) == ["delivered"],
                20,
            )
        first, second = receiver.received
        assert first.headers["webhook-id"] == second.headers["webhook-id"]
        assert first.body == second.body


def test_a_receiver_that_asks_for_time_gets_it_within_bounds(store: Store) -> None:
    answer = answer_status(429, **{"Retry-After": "600"})
    with receiving(answer) as receiver, delivering(store, send) as pass_:
        webhook = add(store, receiver.url)
        finish_job(store)
        began_at = now()
        pass_.step()

        def failed() -> bool:
            (one,) = store.deliveries.newest(webhook.id, 1)
            return one.last_status == 429

        wait_until("the attempt", failed, 10)
        (one,) = store.deliveries.newest(webhook.id, 1)
        assert one.next_at is not None
        assert 600 <= (one.next_at - began_at).total_seconds() < 600 * 1.2 + 10
    assert pause_s(1, 1e12, draw=lambda: 0.0) == LONGEST_PAUSE_S
    assert pause_s(1, 100, draw=lambda: 0.5) == pytest.approx(110)
    assert pause_s(9, 1, draw=lambda: 0.5) == LONGEST_PAUSE_S  # not before the usual pause
