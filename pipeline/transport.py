"""Kombu's Redis transport, mended where a lost broker would end a busy worker.

When a connection is lost, Celery 5.7 first takes kombu's transport apart and then closes the
channel, which wants to give back what it has not acknowledged, looks up where the broker was and
finds nothing: an AttributeError, which ends the worker. A connection error is what every caller
there expects and passes over. Nothing has to be given back: what nobody claims is sent again.
"""

from kombu.transport import TRANSPORT_ALIASES
from kombu.transport.redis import Channel as RedisChannel
from kombu.transport.redis import Transport as RedisTransport
from redis.exceptions import ConnectionError as RedisConnectionError


class Channel(RedisChannel):  # type: ignore[misc]  # kombu is half typed
    """A channel that says so when its connection is gone."""

    def _connparams(self, asynchronous: bool = False) -> dict[str, object]:
        if self.connection is None or self.connection.client is None:
            raise RedisConnectionError("the connection to the broker is closed")
        params: dict[str, object] = super()._connparams(asynchronous=asynchronous)
        return params


class Transport(RedisTransport):  # type: ignore[misc]  # kombu is half typed
    """The transport of `redis://` and `redis+socket://` in Nightjar's processes."""

    Channel = Channel


def install() -> None:
    """Let kombu use it for the Redis schemes."""
    for scheme in ("redis", "rediss"):
        TRANSPORT_ALIASES[scheme] = f"{__name__}:{Transport.__name__}"
