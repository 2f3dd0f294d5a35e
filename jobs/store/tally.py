"""What this process has landed: outcomes and tokens, counted after each commit."""

import threading
from collections import Counter
from collections.abc import Mapping


class Tally:
    """Sums over the committed transactions of one process; safe to share between threads.

    A transaction that is rolled back counts nothing. So each outcome is counted once, by the
    process that landed it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._open = _Open()

    def begin(self) -> None:
        """Forget what a transaction of this thread has noted and not committed."""
        self._open.noted.clear()

    def note(self, more: Mapping[str, int]) -> None:
        """Note what the transaction of this thread adds to a job's counters."""
        self._open.noted.update(more)

    def commit(self) -> None:
        """Add what the transaction has noted."""
        if self._open.noted:
            with self._lock:
                self._totals.update(self._open.noted)
            self._open.noted.clear()

    def read(self) -> Mapping[str, int]:
        """Return the sums by the names of the job's counters; a missing name means 0."""
        with self._lock:
            return Counter(self._totals)


class _Open(threading.local):
    """What this thread's transaction has noted."""

    def __init__(self) -> None:
        self.noted: Counter[str] = Counter()
