"""What each statement takes of PostgreSQL's processor time, read from the backend that runs it.

Linux counts a process's time on a processor in nanoseconds (`/proc/PID/schedstat`). A statement is
done when its answer is there, so the difference around it is its own.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from nightjar.jobs.store import Store

_KIND = re.compile(r"(INSERT INTO|UPDATE|DELETE FROM|FROM)\s+(\w+)")
_FROM = "FROM"


class StatementCosts:
    """Nanoseconds and calls by kind of statement: `INSERT INTO result`, `SELECT job`."""

    def __init__(self) -> None:
        self.nanoseconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def per_row(self, rows: int) -> dict[str, dict[str, float]]:
        """Microseconds of a row, and calls for a thousand rows; the dearest first."""
        return {
            kind: {
                "us_per_row": round(spent / rows / 1e3, 2),
                "calls_per_1000_rows": round(1_000 * self.calls[kind] / rows, 2),
            }
            for kind, spent in self.nanoseconds.most_common()
        }


@contextmanager
def counted(store: Store) -> Iterator[StatementCosts]:
    """Count the statements of a store on PostgreSQL, while the block runs."""
    costs, engine = StatementCosts(), store.database.engine
    begun: dict[int, int] = {}

    def begin(connection: sa.Connection, *_: object) -> None:
        pid = _backend(connection)
        begun[pid] = _nanoseconds(pid)

    def end(connection: sa.Connection, _: object, statement: str, *__: object) -> None:
        pid = _backend(connection)
        kind = kind_of(statement)
        costs.nanoseconds[kind] += _nanoseconds(pid) - begun[pid]
        costs.calls[kind] += 1

    listeners = (("before_cursor_execute", begin), ("after_cursor_execute", end))
    for name, listener in listeners:
        sa.event.listen(engine, name, listener)
    try:
        yield costs
    finally:
        for name, listener in listeners:
            sa.event.remove(engine, name, listener)


def kind_of(statement: str) -> str:
    """What a statement does first, and to which table."""
    found = _KIND.search(statement)
    if found is None:
        return statement.split(maxsplit=1)[0]
    verb, table = found.groups()
    return f"{'SELECT' if verb == _FROM else verb} {table}"


def _backend(connection: sa.Connection) -> int:
    driver: Any = connection.connection.driver_connection
    return int(driver.info.backend_pid)


def _nanoseconds(pid: int) -> int:
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0])
