"""The dispatcher's messages, as they stand in a real broker."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import redis
from celery import Celery
from kombu.exceptions import OperationalError

from nightjar.jobs.records import MicroBatchRef
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service
from nightjar.pipeline.queue.celery_app import TICK_TASK, create_celery_app
from nightjar.pipeline.queue.clock import Scheduler
from nightjar.pipeline.queue.dispatcher import (
    PER_LEASE,
    dispatch,
    empty_queues,
    find_lost,
    publish,
)
from nightjar.pipeline.queue.queues import PLAN_QUEUE, compute_queue
from nightjar.pipeline.queue.waking import CLOCK_MARK, MOST_WAKES, messages_waiting, send_wake
from nightjar.pipeline.settings import Settings
from tests.jobs import planned

PLAIN = MicroBatchRef(7, 2, "job_1", RequestKind.GENERATE, 128, 5, 90)


@dataclass
class Broker:
    """A private broker, and the application that sends to it."""

    app: Celery
    server: redis.Redis

    def message(self, queue: str) -> dict[str, Any]:
        """Take the next message of one of the broker's lists."""
        raw = self.server.rpop(queue)
        assert isinstance(raw, bytes), self.server.keys()
        message: dict[str, Any] = json.loads(raw)
        return message


@pytest.fixture
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    folder = tmp_path_factory.mktemp("b")
    service = Service("broker", broker_command(folder), folder / "log", {}, folder)
    service.start()
    wait_for_broker(folder, service)
    app = create_celery_app(Settings.read(broker_url=broker_url(folder)))
    server = redis.Redis(unix_socket_path=str(folder / "broker.sock"))
    yield Broker(app, server)
    server.close()
    app.close()
    service.stop(5)


def kwargs(message: dict[str, Any]) -> dict[str, object]:
    _, given, _ = json.loads(base64.b64decode(message["body"]))
    assert isinstance(given, dict)
    return given


ORDINARY_LIST = "generate-128\x06\x169"


def test_a_message_names_the_micro_batch_and_shows_what_it_is(broker: Broker) -> None:
    publish(broker.app, PLAIN)
    message = broker.message(ORDINARY_LIST)
    assert kwargs(message) == {"micro_batch": 7, "epoch": 2}
    assert message["headers"]["shadow"] == "generate, bucket 128"
    assert "epoch=2" in message["headers"]["kwargsrepr"]


def test_a_message_of_a_call_goes_into_the_lane_of_its_model(broker: Broker) -> None:
    publish(broker.app, replace(PLAIN, size=1, fingerprint="0123456789abcdef", live=True))
    message = broker.message("0123456789ab-live")  # the list of the highest priority
    assert kwargs(message) == {"micro_batch": 7, "epoch": 2, "live": True}
    assert message["headers"]["shadow"] == "generate, bucket 128, live"


def test_a_message_of_suspects_says_so(broker: Broker) -> None:
    publish(broker.app, replace(PLAIN, size=1, isolated=True))
    message = broker.message(ORDINARY_LIST)
    assert kwargs(message) == {"micro_batch": 7, "epoch": 2, "alone": True}
    assert message["headers"]["shadow"] == "generate, bucket 128, suspects"


def test_urgent_messages_stand_in_the_list_that_is_served_first(broker: Broker) -> None:
    publish(broker.app, PLAIN)
    publish(broker.app, replace(PLAIN, id=8, urgent=True))
    assert kwargs(broker.message("generate-128"))["micro_batch"] == 8
    assert kwargs(broker.message(ORDINARY_LIST))["micro_batch"] == 7


def test_the_window_grows_with_the_leases_of_the_workers(broker: Broker, store: Store) -> None:
    _, refs = planned(store, 12)
    assert dispatch(broker.app, store.planning, 2) == 2
    assert dispatch(broker.app, store.planning, 2) == 0
    for ref in refs[:2]:
        assert store.leases.claim(ref.id, ref.epoch, "worker")
    assert dispatch(broker.app, store.planning, 2) == 2 * PER_LEASE - 2
    assert [ref.id for ref in store.planning.dispatched()] == [
        ref.id for ref in refs[2 : 2 * PER_LEASE]
    ]


def test_what_waits_in_its_queue_is_not_lost_however_long(broker: Broker) -> None:
    sent = [replace(PLAIN, id=n, urgent=n == 0) for n in range(3)]
    for ref in sent:
        publish(broker.app, ref)
    elsewhere = replace(PLAIN, id=9, bucket=64)
    unclaimed = [*sent, elsewhere]
    assert find_lost(broker.app, unclaimed, unclaimed) == [elsewhere]
    broker.server.rpop(ORDINARY_LIST)  # a worker takes it, and is killed before it claims
    assert find_lost(broker.app, unclaimed, sent) == sent[:1]
    broker.server.flushall()
    assert find_lost(broker.app, unclaimed, sent) == sent
    assert find_lost(broker.app, unclaimed, []) == []


def test_the_messages_of_one_model_are_dropped(broker: Broker) -> None:
    retired, served = "a" * 64, "b" * 64
    for fingerprint in (retired, served):
        for urgent in (False, True):
            publish(broker.app, replace(PLAIN, fingerprint=fingerprint, urgent=urgent))
    empty_queues(broker.app, retired)
    waiting = [
        messages_waiting(broker.app, compute_queue(fingerprint, PLAIN.kind, PLAIN.bucket))
        for fingerprint in (retired, served)
    ]
    assert waiting == [0, 2]


def test_nothing_is_called_lost_while_the_broker_is_away() -> None:
    with create_celery_app(Settings.read(broker_url="redis://127.0.0.1:1/0")) as app:
        app.conf.broker_transport_options |= {"max_retries": 0}
        assert find_lost(app, [PLAIN], [PLAIN]) == []


def test_wakes_are_bounded_while_no_planner_takes_them(broker: Broker) -> None:
    sent = [send_wake(broker.app, TICK_TASK) for _ in range(MOST_WAKES + 20)]
    assert sent == [True] * MOST_WAKES + [False] * 20
    assert messages_waiting(broker.app, PLAN_QUEUE) == MOST_WAKES
    broker.server.delete("plan", "plan\x06\x169")
    assert send_wake(broker.app, TICK_TASK)


def test_a_broker_that_goes_away_is_called_away(broker: Broker) -> None:
    broker.app.conf.broker_transport_options |= {"max_retries": 0}
    assert messages_waiting(broker.app, PLAN_QUEUE) == 0
    broker.server.shutdown(nosave=True)
    with pytest.raises(OperationalError):
        messages_waiting(broker.app, PLAN_QUEUE)


def test_beat_sends_its_ticks_within_the_bound(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightjar.pipeline.queue.waking.MOST_WAKES", 2)
    scheduler = Scheduler(broker.app, lazy=True)
    scheduler.setup_schedule()
    assert scheduler.schedule.keys() == {"tick"}
    for _ in range(5):
        scheduler.apply_async(scheduler.schedule["tick"], advance=False)
    assert messages_waiting(broker.app, PLAN_QUEUE) == 2
    assert broker.server.exists(CLOCK_MARK)  # by which others see that it lives
