"""The time that a process has watched others, by which their silence is measured."""

import time
from collections.abc import Callable


class WatchedTime:
    """Counts seconds between looks; a long gap counts little, for nobody was heard in it.

    A gap is long where the database was away or took no writes, or this process was stopped.

    Args:
        longest_gap_s: The time between two looks counts at most so much.
        clock: Monotonic seconds, so that clocks that differ or jump do not matter.
    """

    def __init__(self, longest_gap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_gap_s = longest_gap_s
        self._clock = clock
        self._counted_at = clock()
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """The seconds that count, up to the newest look."""
        return self._seconds

    def count(self) -> None:
        """Count the time since the last look."""
        now = self._clock()
        self._seconds += min(now - self._counted_at, self._longest_gap_s)
        self._counted_at = now
