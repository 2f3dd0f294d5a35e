"""Tells the planner that it may dispatch more, but not after every micro-batch."""

import logging
import threading
from collections.abc import Callable

from kombu.exceptions import OperationalError

logger = logging.getLogger(__name__)

TICK_EVERY_S = 0.1
_CLOSE_S = 5.0  # an absent broker may block a sender longer; the thread ends with the process


class Ticker:
    """Sends ticks: at once after a pause, else at most one every `every_s` seconds.

    Args:
        send: Sends a tick; OperationalError means that the broker is away.
        every_s: Much shorter than the time in which the dispatched micro-batches run out, and long
            enough for several micro-batches to end.
    """

    def __init__(self, send: Callable[[], object], every_s: float = TICK_EVERY_S) -> None:
        self._send = send
        self._every_s = every_s
        self._due = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self._thread.start()

    def tick(self) -> None:
        """Note that a micro-batch has ended; return at once."""
        self._due.set()

    def close(self) -> None:
        """End without sending a tick that is due: beat sends one by itself."""
        self._stop.set()
        self._due.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while self._due.wait() and not self._stop.is_set():
            self._due.clear()
            try:
                self._send()
            except OperationalError as error:
                # The results have landed; beat ticks when the broker is back.
                logger.warning("no tick sent: %s", error, extra={"action": "tick_not_sent"})
            self._stop.wait(self._every_s)
