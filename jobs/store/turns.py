"""Pauses in long work, so that other processes can write."""

import time

from nightjar.jobs.store.database import Database


class Turns:
    """Lets other processes write between the steps of long work.

    SQLite's other writers poll every 0.1 s at most for the write lock. Steps that follow each other
    at once would keep them out. PostgreSQL needs no turns.
    """

    _WRITE_S = 0.2
    _PAUSE_S = 0.12

    def __init__(self, database: Database, write_s: float = _WRITE_S) -> None:
        """`write_s` is long enough; with 0 every step is followed by a pause."""
        self._write_s = write_s
        self._is_sqlite = database.is_sqlite
        self._since = time.monotonic()

    def give(self) -> None:
        """Pause between two steps if this process has written for long enough."""
        if self._is_sqlite and time.monotonic() - self._since >= self._write_s:
            time.sleep(self._PAUSE_S)
            self._since = time.monotonic()
