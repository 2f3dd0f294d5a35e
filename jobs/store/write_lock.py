"""SQLite's write lock: how the threads of a process take turns, and how single calls get it soon.

SQLite admits one writer. Another one asks for the lock after ever longer pauses, up to 0.1 s. A
single call asks every millisecond, and goes before the other threads of its process.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.engine import Connection

_ASK_EVERY_S = 0.001
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


class WriterTurns:
    """Lets one thread of a process write at a time; those of single calls go first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = False
        self._urgent = 0  # threads of single calls that wait

    @contextmanager
    def turn(self, *, urgent: bool = False) -> Iterator[None]:
        """Wait for the turn, and hold it in the block."""
        with self._changed:
            self._urgent += urgent
            try:
                self._changed.wait_for(lambda: not self._taken and (urgent or not self._urgent))
            finally:
                self._urgent -= urgent
            self._taken = True
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self._changed.notify_all()


def begin_soon(connection: Connection, timeout_ms: int) -> None:
    """Begin a write transaction as soon as the lock is free.

    Raises:
        sqlalchemy.exc.OperationalError: It was not free for so long.
    """
    driver = connection.connection.driver_connection
    if not isinstance(driver, sqlite3.Connection):
        raise TypeError("only SQLite has this lock")
    deadline = time.monotonic() + timeout_ms / 1_000
    driver.execute("PRAGMA busy_timeout = 0")
    try:
        while not _begins(driver):
            if time.monotonic() >= deadline:
                break
            time.sleep(_ASK_EVERY_S)
        else:
            return
    finally:
        driver.execute(f"PRAGMA busy_timeout = {timeout_ms}")
    connection.exec_driver_sql("BEGIN IMMEDIATE")  # raises as any other writer's does


def _begins(driver: sqlite3.Connection) -> bool:
    try:
        driver.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in _LOCKED:
            raise
        return False
    return True
