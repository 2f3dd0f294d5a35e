"""SQLite's write lock: how single calls get it soon.

SQLite admits one writer. Another one asks for the lock after ever longer pauses, up to 0.1 s. A
single call asks every millisecond. The threads of a process take turns (`priority_turns.py`).
"""

import sqlite3
import time

from sqlalchemy.engine import Connection

_ASK_EVERY_S = 0.001
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


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
