"""A real broker ends while a worker holds a message that it has not acknowledged."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kombu import Queue
from pydantic import SecretStr

from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service
from nightjar.pipeline.queue.celery_app import TICK_TASK, create_celery_app
from nightjar.pipeline.queue.queues import PLAN_QUEUE
from nightjar.pipeline.queue.waking import messages_waiting
from nightjar.pipeline.settings import Settings


@pytest.fixture
def broker() -> Iterator[tuple[Service, str]]:
    with tempfile.TemporaryDirectory(prefix="nightjar-") as name:
        directory = Path(name)
        service = Service("broker", broker_command(directory), directory / "log", {}, directory)
        service.start()
        try:
            wait_for_broker(directory, service)
            yield service, broker_url(directory)
        finally:
            service.stop(5)


def test_without_a_key_messages_are_sent_unsigned(broker: tuple[Service, str]) -> None:
    _, url = broker
    with create_celery_app(Settings(broker_url=SecretStr(url))) as app:
        assert app.control.broadcast("ping", reply=True, timeout=0.1) == []  # nobody is there
        app.send_task(TICK_TASK)
        assert messages_waiting(app, PLAN_QUEUE) == 1


def test_a_taken_message_leaves_nothing_in_the_broker_and_comes_back_as_it_was(
    broker: tuple[Service, str],
) -> None:
    _, url = broker
    with (
        create_celery_app(Settings(broker_url=SecretStr(url))) as app,
        app.connection_for_read() as connection,
    ):
        client = connection.default_channel.client
        with connection.Producer() as producer:
            for number in range(3):
                producer.publish({"n": number}, routing_key="held", declare=[Queue("held")])
        channel = connection.channel()
        kept, done, _ = [Queue("held")(channel).get() for _ in range(3)]
        assert kept is not None
        assert done is not None
        done.ack()
        assert client.keys("unacked*") == []
        assert client.llen("held") == 0
        channel.close()
        assert client.llen("held") == 2
        again = Queue("held")(connection.default_channel).get()
        assert again is not None
        assert (again.payload, again.delivery_tag) == ({"n": 0}, kept.delivery_tag)
        assert again.headers["redelivered"]


def test_closing_what_is_left_raises_nothing(broker: tuple[Service, str]) -> None:
    service, url = broker
    app = create_celery_app(Settings(broker_url=SecretStr(url)))
    with app.connection_for_read() as connection:
        queue = Queue("held")
        with connection.Producer() as producer:
            producer.publish({}, routing_key="held", declare=[queue])
        held = queue(connection.default_channel).get()
        assert held is not None
        # As in a worker's event loop, which waits for the next messages as well.
        for channel in (connection.default_channel, connection.channel()):
            channel.basic_consume("held", False, lambda _: None, f"waiting {channel.channel_id}")
        connection.transport.cycle.on_poll_start()
        service.stop(5)
        # What Celery does next; an error here would end the worker.
        connection.collect(socket_timeout=1)
        connection.close()
        held.ack_log_error(app.log.get_default_logger(), connection.connection_errors)
