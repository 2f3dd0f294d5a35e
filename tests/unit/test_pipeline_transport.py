"""Nightjar's Redis transport is in use, and raises when its connection is gone."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
from kombu.transport.redis import Transport as RedisTransport
from pydantic import SecretStr
from redis import ConnectionPool, Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from nightjar.pipeline.queue import transport
from nightjar.pipeline.queue.celery_app import create_celery_app
from nightjar.pipeline.queue.transport import Channel, Drops, Transport
from nightjar.pipeline.settings import Settings
from tests.foreign_messages import good_message


@pytest.mark.parametrize("url", ["redis://:pw@valkey:6379/0", "redis+socket:///tmp/b.sock"])
def test_it_carries_nightjars_messages(url: str) -> None:
    app = create_celery_app(Settings(broker_url=SecretStr(url)))
    assert app.connection_for_write().get_transport_cls() is Transport


class PooledChannel(Channel):
    """A channel whose pools connect to nothing."""

    def __init__(self) -> None:
        self.Client = Redis

    def _get_pool(self, asynchronous: bool = False) -> ConnectionPool:
        return ConnectionPool()

    def lose_connection(self) -> None:
        """Do what the transport does when a connection is lost."""
        self._pool = None


def client_of(channel: Channel) -> Redis:
    """The client that the channel sends with."""
    with channel.conn_or_acquire() as client:
        assert isinstance(client, Redis)
        return client


@pytest.mark.parametrize("connection", [None, SimpleNamespace(client=None)])
def test_a_closed_connection_is_a_connection_error(connection: object) -> None:
    channel = Channel.__new__(Channel)
    channel.Client = Redis
    channel.connection = connection
    with pytest.raises(Transport.connection_errors, match="closed"):
        client_of(channel)


def test_a_flood_of_foreign_messages_is_counted_and_does_not_flood_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 120.0
    monkeypatch.setattr(transport.time, "monotonic", lambda: now)
    drops = Drops()
    for _ in range(501):
        drops.add("it is foreign")
    assert len(caplog.records) == 500
    now = 179.9
    drops.add("it is foreign")
    assert len(caplog.records) == 500
    now = 180.0
    drops.add("it is foreign")
    assert drops.count == 503
    assert caplog.records[-1].getMessage() == "foreign message dropped, 503 so far: it is foreign"
    assert len(caplog.records) == 501


@pytest.mark.parametrize(
    ("error", "dropped"), [(RedisConnectionError("gone"), 0), (KeyError("task"), 1)]
)
def test_an_error_of_the_broker_drops_no_message_and_any_other_does(
    error: Exception, dropped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deliver(*_: object) -> None:
        raise error

    monkeypatch.setattr(RedisTransport, "_deliver", deliver)
    receiving = Transport.__new__(Transport)
    receiving.client, receiving.channels = SimpleNamespace(transport_options={}), []
    before = transport.drops.count
    with suppress(RedisConnectionError):
        receiving._deliver(good_message("plan", "nightjar.tick"), "plan")
    assert transport.drops.count - before == dropped


def test_a_channel_keeps_its_client() -> None:
    channel = PooledChannel()
    with channel.conn_or_acquire() as first, channel.conn_or_acquire() as second:
        assert first is second
        assert first.connection_pool is channel.pool


def test_a_pool_made_after_a_lost_connection_has_a_client_of_its_own() -> None:
    channel = PooledChannel()
    before = client_of(channel)
    channel.lose_connection()
    assert client_of(channel) is not before
    assert client_of(channel).connection_pool is channel.pool


def test_waiting_for_messages_has_a_client_of_its_own() -> None:
    channel = PooledChannel()
    sending = client_of(channel)
    assert channel.client.connection_pool is channel.async_pool
    assert client_of(channel) is sending
