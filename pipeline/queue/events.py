"""Sends the events of tasks, which Flower shows, in few messages."""

import time

from celery.worker.consumer import Consumer as CeleryConsumer

FLUSH_EVERY_S = 0.2  # fast enough for a person who reads them


class Consumer(CeleryConsumer):  # type: ignore[misc]  # Celery is untyped
    """Celery's consumer; it sends an event at once after a pause, else several together.

    Celery sends each event by itself. At hundreds of micro-batches a second, with three events
    each, that is more work than taking and acknowledging the messages.
    """

    _next_flush = 0.0  # by the monotonic clock

    def on_send_event_buffered(self) -> None:
        """Note that an event waits; may be called from any thread."""
        if time.monotonic() >= self._next_flush:
            super().on_send_event_buffered()

    def _flush_events(self) -> None:
        self._next_flush = time.monotonic() + FLUSH_EVERY_S
        super()._flush_events()
        # Collect the events that come meanwhile.
        self.hub.call_later(FLUSH_EVERY_S, super()._flush_events)
