"""Turns at something that few threads may use at once; urgent threads go first.

SQLite admits one writer. A GPU worker has few connections to PostgreSQL. At both, a single call
must not wait behind the results of jobs.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TurnTimeoutError(Exception):
    """No place was free in time."""


class PriorityTurns:
    """Lets so many threads of a process in at a time; urgent ones go first.

    Args:
        places: How many threads may be in.
        kept: Places that only urgent threads take: what blocks the others does not block these.
    """

    def __init__(self, places: int = 1, *, kept: int = 0) -> None:
        if not 0 <= kept < places:
            raise ValueError(f"{kept} of {places} places cannot be kept: others need one")
        self._changed = threading.Condition()
        self._places, self._kept = places, kept
        self._inside = self._ordinary = 0  # all threads that are in, and those not urgent
        self._waiting = 0  # urgent threads that wait

    @contextmanager
    def turn(self, *, urgent: bool = False, timeout_s: float | None = None) -> Iterator[None]:
        """Wait for the turn, and hold it in the block; a thread takes one at a time.

        Raises:
            TurnTimeoutError: There was none within `timeout_s`.
        """
        with self._changed:
            self._waiting += urgent
            try:
                if not self._changed.wait_for(lambda: self._admits(urgent), timeout_s):
                    raise TurnTimeoutError(f"no place was free for {timeout_s:.0f} s")
                self._inside += 1
                self._ordinary += not urgent
            finally:
                self._waiting -= urgent
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._ordinary -= not urgent
                self._changed.notify_all()

    def _admits(self, urgent: bool) -> bool:
        if self._inside == self._places:
            return False
        return urgent or not (self._waiting or self._ordinary == self._places - self._kept)
