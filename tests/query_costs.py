"""What PostgreSQL reads for each statement: it runs it under EXPLAIN first, and takes it back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from nightjar.jobs.store import Store

_READS = ("SELECT", "WITH")
_WRITES = ("UPDATE", "INSERT", "DELETE")
_REMOVED = ("Rows Removed by Filter", "Rows Removed by Index Recheck")


@dataclass(frozen=True, slots=True)
class Cost:
    """A statement; the rows that its scans and joins looked at, and the pages that it used."""

    statement: str
    rows: int
    pages: int


@contextmanager
def costs(store: Store) -> Iterator[list[Cost]]:
    """The costs of all statements of the block, in their order; of those of many rows, none."""
    found: list[Cost] = []

    def note(
        connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> None:
        writes = statement.startswith(_WRITES)
        if many or not (writes or statement.startswith(_READS)):
            return
        if writes:
            cursor.execute("SAVEPOINT explained")
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
        ((plan,),) = cursor.fetchall()
        if writes:
            cursor.execute("ROLLBACK TO SAVEPOINT explained")
        root = plan[0]["Plan"]
        pages = root["Shared Hit Blocks"] + root["Shared Read Blocks"]
        found.append(Cost(statement, _rows(root), pages))

    sa.event.listen(store.database.engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        sa.event.remove(store.database.engine, "before_cursor_execute", note)


def _rows(node: Mapping[str, Any]) -> int:
    """Rows that the scans and joins below a node looked at."""
    found = sum(_rows(one) for one in node.get("Plans", ()))
    loops = node["Actual Loops"]
    found += int(node.get("Rows Removed by Join Filter", 0) * loops)
    if "Relation Name" not in node or node["Node Type"] in {"ModifyTable", "Bitmap Heap Scan"}:
        return found
    read = node["Actual Rows"] + sum(node.get(name, 0) for name in _REMOVED)
    return found + int(read * loops)
