"""Tells the planner of free places in the dispatch window, but not after every micro-batch."""

import logging
import threading
from collections.abc import Callable

from kombu.exceptions import OperationalError

logger = logging.getLogger(__name__)

TICK_EVERY_S = 0.1
_CLOSE_S = 5.0  # a broker that is away may hold a sender longer; its thread ends with the process


class Ticker:
    """Sends a tick when one is due, at once after a pause, else no more than one in `every_s`.

    Args:
        send: Sends one; OperationalError means that the broker is away.
        every_s: Far shorter than the window takes to run empty, long enough for several
            micro-batches to end.
    """

    def __init__(self, send: Callable[[], object], every_s: float = TICK_EVERY_S) -> None:
        self._send = send
        self._every_s = every_s
        self._due = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self._thread.start()

    def tick(self) -> None:
        """A micro-batch has ended; returns at once."""
        self._due.set()

    def close(self) -> None:
        """End; a tick that is due now is left to beat, which sends one by itself."""
        self._stop.set()
        self._due.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while self._due.wait() and not self._stop.is_set():
            self._due.clear()
            try:
                self._send()
            except OperationalError as error:
                # The work has landed; beat ticks once the broker is back.
                logger.warning("no tick sent: %s", error, extra={"action": "tick_not_sent"})
            self._stop.wait(self._every_s)
