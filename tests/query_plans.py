"""How the databases read: the plan of each statement, and the tables that it reads whole."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import sqlalchemy as sa

from nightjar.jobs.store import Store

BIG = ("job", "request", "result", "landing", "micro_batch")
_PARTITION = re.compile(r"_p\d+\b")


@contextmanager
def explained(
    store: Store, kinds: tuple[str, ...] = ("SELECT", "WITH")
) -> Iterator[list[tuple[str, str]]]:
    """Each statement that reads, or is of these kinds, and how the database does it."""
    found: list[tuple[str, str]] = []
    explain = "EXPLAIN QUERY PLAN " if store.database.is_sqlite else "EXPLAIN "

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith(kinds):
            cursor.execute(explain + statement, parameters)
            found.append((statement, "\n".join(str(row) for row in cursor.fetchall())))

    sa.event.listen(store.database.engine, "before_cursor_execute", note)
    yield found
    sa.event.remove(store.database.engine, "before_cursor_execute", note)


def whole_reads(plan: str, big: Sequence[str] = BIG) -> list[str]:
    """The big tables that a plan reads whole."""
    words = _PARTITION.sub("", plan).replace("'", " ").replace(")", " ").split()
    scanned = {name for word, name in pairwise(words) if word == "SCAN"}
    scanned |= {
        name for at, name in enumerate(words[3:], 3) if words[at - 3 : at] == ["Seq", "Scan", "on"]
    }
    return [name for name in big if name in scanned]
