"""Kombu's Redis transport, mended where the broker or what lies in it would end a worker.

- A connection that is lost: Celery 5.7 first takes kombu's transport apart and then closes the
  channel, which wants to give back what it has not acknowledged, looks up where the broker was and
  finds nothing: an AttributeError, which ends the worker. A connection error is what every caller
  there expects and passes over. Nothing has to be given back: what nobody claims is sent again.
- A broker that is full: a message is taken off its list before it is noted as taken, and the note
  is refused. The message is worked on without it: the note would only serve to deliver it again.
- A message that is none: it is dropped.

And where it is slow: kombu makes a client anew for every note, acknowledgement and message sent,
which takes longer than what the client is made for.
"""

import logging
from json import JSONDecodeError

from kombu.transport import TRANSPORT_ALIASES
from kombu.transport.redis import Channel as RedisChannel
from kombu.transport.redis import QoS as RedisQoS
from kombu.transport.redis import Transport as RedisTransport
from kombu.transport.virtual import QoS as VirtualQoS
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError

from nightjar.pipeline.queues import is_ours

logger = logging.getLogger(__name__)


class QoS(RedisQoS):  # type: ignore[misc]  # kombu is half typed
    """The notes of what has been taken and not acknowledged."""

    def append(self, message: object, delivery_tag: str) -> None:
        """Note a message; in a full broker it goes without."""
        try:
            super().append(message, delivery_tag)
        except OutOfMemoryError as error:
            logger.warning("message not noted: %s", error, extra={"action": "broker_full"})
            VirtualQoS.append(self, message, delivery_tag)  # counts it, in this process alone


class Channel(RedisChannel):  # type: ignore[misc]  # kombu is half typed
    """A channel that says so when its connection is gone, and passes over what is no JSON."""

    QoS = QoS
    _known_client: Redis | None = None

    def _create_client(self, asynchronous: bool = False) -> Redis:
        """The client of the channel's pool; one that waits for messages is made for that alone."""
        if asynchronous:
            waiting: Redis = super()._create_client(asynchronous=True)
            return waiting
        # The pool is another one after a connection was lost.
        if self._known_client is None or self._known_client.connection_pool is not self.pool:
            self._known_client = super()._create_client()
        return self._known_client

    def _connparams(self, asynchronous: bool = False) -> dict[str, object]:
        if self.connection is None or self.connection.client is None:
            raise RedisConnectionError("the connection to the broker is closed")
        params: dict[str, object] = super()._connparams(asynchronous=asynchronous)
        return params

    def _brpop_read(self, **options: object) -> object:
        try:
            return super()._brpop_read(**options)
        except (JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            _drop(f"it is no JSON: {error}")
            return True


class Transport(RedisTransport):  # type: ignore[misc]  # kombu is half typed
    """The transport of `redis://` and `redis+socket://` in Nightjar's processes."""

    Channel = Channel

    def _deliver(self, message: object, queue: str) -> None:
        # Kombu's own queues, of events and of remote control, carry messages of other shapes.
        fault = _fault(message) if is_ours(queue) else None
        if fault is not None:
            _drop(fault)
        else:
            super()._deliver(message, queue)


def install() -> None:
    """Let kombu use it for the Redis schemes."""
    for scheme in ("redis", "rediss"):
        TRANSPORT_ALIASES[scheme] = f"{__name__}:{Transport.__name__}"


# What kombu and Celery look up in a message before anything of theirs catches an error.
_PARTS = {
    "body": str,
    "headers": dict,
    "headers.task": str,
    "headers.id": str,
    "properties": dict,
    "properties.delivery_tag": str,
    "properties.delivery_info": dict,
    "properties.delivery_info.exchange": str,
    "properties.delivery_info.routing_key": str,
}


def _fault(message: object) -> str | None:
    """Why this is no message of Celery's; None if it is one."""
    for path, kind in _PARTS.items():
        part: object = message
        for name in path.split("."):
            part = part.get(name) if isinstance(part, dict) else None
        if not isinstance(part, kind):
            return f"{path} is missing or no {kind.__name__}"
    return None


def _drop(fault: str) -> None:
    logger.error("foreign message dropped: %s", fault, extra={"action": "message_dropped"})
