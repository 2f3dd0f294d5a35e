"""Kombu's Redis transport, corrected where the broker or a message in it would end a worker.

- Lost connection: Celery 5.7 first takes kombu's transport apart and then closes the channel. The
  channel tries to give back unacknowledged messages and finds no broker: an AttributeError, which
  ends the worker. Here it is a connection error, which every caller expects and ignores. No message
  has to be given back, because unclaimed messages are sent again.
- Taken messages: kombu notes each in the broker until it is acknowledged, to deliver it again if
  the worker dies. SQL knows that already, and the planner sends unclaimed micro-batches again
  within seconds. So a message is counted in this process alone: two round trips fewer for each, and
  a full broker refuses no note.
- Foreign message: it is dropped, counted and logged (`message_shape.py`, `signing.py`). So is any
  message that raises while it is received. Celery would end the worker, or give the message back to
  the queue, where it ends the next worker.

It also saves time: kombu makes a new client for every message that it sends. That takes longer than
the command that the client is made for.
"""

import logging
import threading
import time
from queue import Empty
from typing import Any

from kombu.exceptions import InconsistencyError
from kombu.transport import TRANSPORT_ALIASES
from kombu.transport.redis import Channel as RedisChannel
from kombu.transport.redis import SentinelChannel as RedisSentinelChannel
from kombu.transport.redis import Transport as RedisTransport
from kombu.transport.virtual import Message
from kombu.transport.virtual import QoS as VirtualQoS
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from nightjar.pipeline.queue.message_shape import (
    LARGEST_OTHER_BYTES,
    MessageError,
    check_message,
    is_control_queue,
    is_task_queue,
    read_message,
)
from nightjar.pipeline.queue.signing import Signer

logger = logging.getLogger(__name__)

# Errors of the broker and of the connection to it, which Celery recovers from. Not kombu's longer
# list of them: it holds KeyError, which a foreign message may cause.
_BROKER_ERRORS = (RedisError, OSError, InconsistencyError)
_MOST_LINES_A_MINUTE = 500


class Drops:
    """Counts and logs dropped messages; a flood of messages does not flood the log."""

    def __init__(self) -> None:
        self.count = 0
        self._lines = 0
        self._minute = 0
        self._lock = threading.Lock()

    def add(self, reason: str) -> None:
        """Count a dropped message, and log it unless 500 lines were written in this minute."""
        with self._lock:
            self.count += 1
            minute = int(time.monotonic() // 60)
            if minute != self._minute:
                self._minute, self._lines = minute, 0
            self._lines += 1
            if self._lines > _MOST_LINES_A_MINUTE:
                return
            logger.error(
                "foreign message dropped, %d so far: %s",
                self.count,
                reason,
                extra={"action": "message_dropped", "dropped": self.count},
            )


drops = Drops()


class QoS(VirtualQoS):  # type: ignore[misc]  # kombu is half typed
    """The messages that this process has taken and not acknowledged."""

    def restore_unacked(self) -> list[tuple[BaseException, object]]:
        """Give the messages back to their queues, so that other workers need not wait for them.

        Those that cannot be given back are sent again by the planner. Kombu would write them into
        a file.
        """
        self._flush()
        while self._delivered:
            _, message = self._delivered.popitem()  # the oldest last: it is taken next
            try:
                self.channel._restore(message)
            except _BROKER_ERRORS as error:
                left = 1 + len(self._delivered)
                logger.info("%d messages are not given back: %s", left, error)
                self._delivered.clear()
        return []


class Channel(RedisChannel):  # type: ignore[misc]  # kombu is half typed
    """A channel that raises a connection error when its connection is gone, and signs messages."""

    ack_emulation = False  # no notes in the broker
    signer: Signer | None = None  # a transport option
    from_transport_options = (*RedisChannel.from_transport_options, "signer")
    _known_client: Redis | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.QoS = QoS  # kombu sets its own

    def _create_client(self, asynchronous: bool = False) -> Redis:
        """Return the client of the channel's pool; a client that waits for messages has its own."""
        if asynchronous:
            waiting: Redis = super()._create_client(asynchronous=True)
            return waiting
        # After a lost connection the pool is a new one.
        if self._known_client is None or self._known_client.connection_pool is not self.pool:
            self._known_client = super()._create_client()
        return self._known_client

    def _restore(self, message: Message, leftmost: bool = False) -> None:
        """Put a taken message back, as it came, where it is taken next."""
        info = message.delivery_info
        with self.conn_or_acquire() as client:
            pipe = client.pipeline()
            self._do_restore_message(
                message._raw, info["exchange"], info["routing_key"], pipe, leftmost
            )
            pipe.execute()

    def _connparams(self, asynchronous: bool = False) -> dict[str, object]:
        if self.connection is None or self.connection.client is None:
            raise RedisConnectionError("the connection to the broker is closed")
        params: dict[str, object] = super()._connparams(asynchronous=asynchronous)
        return params

    def _put(self, queue: str, message: dict[str, Any], **options: object) -> None:
        if self.signer is not None and is_task_queue(queue):
            self.signer.sign(message)
        super()._put(queue, message, **options)

    def _put_fanout(
        self, exchange: str, message: dict[str, Any], routing_key: str, **options: object
    ) -> None:
        if self.signer is not None and is_control_queue(exchange):
            self.signer.sign(message)
        super()._put_fanout(exchange, message, routing_key, **options)

    def _brpop_read(self, **options: object) -> bool:
        """Take one message as kombu does, but check its size before it is parsed."""
        try:
            try:
                taken = self.client.parse_response(self.client.connection, "BRPOP", **options)
            except self.connection_errors:
                self.client.connection.disconnect()  # the next read connects again
                raise
            if not taken:
                raise Empty
            key, raw = taken
            queue = key.decode().rsplit(self.sep, 1)[0]
            self._queue_cycle.rotate(queue)
            try:
                message = read_message(raw, queue)
            except MessageError as error:
                drops.add(str(error))
            else:
                self.connection._deliver(message, queue)
            return True
        finally:
            self._in_poll = None
            self._flush_brpop_reauth()

    def _handle_message(self, client: object, response: list[Any]) -> dict[str, Any]:
        payload: dict[str, Any] = super()._handle_message(client, response)
        data = payload["data"]
        if isinstance(data, bytes) and len(data) > LARGEST_OTHER_BYTES:
            drops.add(f"it has {len(data)} bytes; {LARGEST_OTHER_BYTES} are allowed")
            payload["data"] = b""
        return payload

    def _receive_one(self, client: object) -> object:
        """Take one message of events or remote control."""
        try:
            return super()._receive_one(client)
        except (Empty, *_BROKER_ERRORS):
            raise
        except Exception as error:  # noqa: BLE001 - whatever lay there
            drops.add(f"it cannot be read: {type(error).__name__}")
            return None


class Transport(RedisTransport):  # type: ignore[misc]  # kombu is half typed
    """The transport of `redis://` and `redis+socket://` in Nightjar's processes."""

    Channel = Channel

    def _deliver(self, message: object, queue: str) -> None:
        """Hand a message to its consumer if it is Nightjar's; no message raises."""
        try:
            checked = check_message(message, queue)
            signer = self.client.transport_options.get("signer")
            if signer is not None and (is_task_queue(queue) or is_control_queue(queue)):
                signer.check(checked)
        except MessageError as error:
            drops.add(str(error))
            return
        try:
            super()._deliver(message, queue)
        except _BROKER_ERRORS:
            raise
        except Exception as error:
            logger.exception("a message cannot be received", extra={"action": "message_faulty"})
            self._forget(checked["properties"]["delivery_tag"])
            drops.add(f"Celery raised {type(error).__name__}")

    def _forget(self, delivery_tag: str) -> None:
        """Acknowledge a dropped message, so that a worker that ends does not give it back."""
        for channel in self.channels:
            if delivery_tag in channel.qos._delivered:
                channel.qos.reject(delivery_tag)


class SentinelChannel(Channel, RedisSentinelChannel):  # type: ignore[misc]
    """A channel that asks Sentinel which server is the master, at each new connection."""

    from_transport_options = (
        *RedisSentinelChannel.from_transport_options,
        *Channel.from_transport_options,
    )


class SentinelTransport(Transport):
    """The transport of `sentinel://`."""

    default_port = 26379
    Channel = SentinelChannel


def install() -> None:
    """Make kombu use these transports for the Redis schemes."""
    of_schemes = {"redis": Transport, "rediss": Transport, "sentinel": SentinelTransport}
    for scheme, transport in of_schemes.items():
        TRANSPORT_ALIASES[scheme] = f"{__name__}:{transport.__name__}"
