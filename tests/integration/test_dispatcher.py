"""The dispatcher's messages, as they stand in a real broker."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import redis
from celery import Celery

from nightjar.jobs.records import MicroBatchRef, RequestKind
from nightjar.pipeline.celery_app import create_celery_app
from nightjar.pipeline.dispatcher import publish
from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service
from nightjar.pipeline.settings import Settings

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
