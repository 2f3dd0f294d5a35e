"""The time for which a process has watched others; their silence is measured in it."""

import time
from collections.abc import Callable


class WatchedTime:
    """Counts the seconds between readings; a long gap counts only in part.

    A gap is long where the database was away or took no writes, or where this process was stopped.
    No heartbeat could be read in it.

    Args:
        longest_gap_s: The time between two readings counts at most so much.
        clock: Monotonic seconds, so that clocks that differ or jump do not matter.
    """

    def __init__(self, longest_gap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_gap_s = longest_gap_s
        self._clock = clock
        self._counted_at = clock()
        self.seconds = 0.0

    def count(self) -> None:
        """Count the time since the last reading."""
        now = self._clock()
        self.seconds += min(now - self._counted_at, self._longest_gap_s)
        self._counted_at = now
