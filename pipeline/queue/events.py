"""Events of tasks, which Flower shows, in few messages."""

import time

from celery.worker.consumer import Consumer as CeleryConsumer

FLUSH_EVERY_S = 0.2  # a person looks at them


class Consumer(CeleryConsumer):  # type: ignore[misc]  # Celery is untyped
    """Celery's consumer, which sends events at once after a pause, else together.

    Celery sends each by itself; at hundreds of micro-batches a second, with three events each, that
    is more work than taking and acknowledging their messages.
    """

    _next_flush = 0.0  # by the monotonic clock

    def on_send_event_buffered(self) -> None:
        """An event waits; any thread."""
        if time.monotonic() >= self._next_flush:
            super().on_send_event_buffered()

    def _flush_events(self) -> None:
        self._next_flush = time.monotonic() + FLUSH_EVERY_S
        super()._flush_events()
        # For those that come meanwhile.
        self.hub.call_later(FLUSH_EVERY_S, super()._flush_events)
