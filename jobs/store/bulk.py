"""Many rows in one statement, without SQLAlchemy's work for each row.

SQLite takes rows one by one through a prepared statement, PostgreSQL takes one array a column.
Values go to the driver as they are: states as plain text, moments through `driver_value`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.store.database import Database
from nightjar.jobs.store.parts import PART_BITS, parts_of_ids

# PostgreSQL takes no statement over 1 GB, and holds several copies of one in memory.
STATEMENT_BYTES = 64 << 20


def driver_value(database: Database, column: sa.Column[Any], value: Any) -> Any:  # noqa: ANN401
    """Convert a value of this column to what the driver takes."""
    dialect = database.engine.dialect
    convert = column.type.dialect_impl(dialect).bind_processor(dialect)
    return value if convert is None else convert(value)


class BulkInsert:
    """INSERT of rows; a key that is there already is an error, unless `skips_known`.

    To skip costs PostgreSQL a second record in its log for each row.
    """

    def __init__(
        self,
        database: Database,
        table: sa.Table,
        columns: Sequence[str],
        *,
        skips_known: bool = False,
    ) -> None:
        self._is_sqlite = database.is_sqlite
        names = ", ".join(columns)
        source = (
            f"VALUES ({_marks(columns)})" if self._is_sqlite else _unnest(database, table, columns)
        )
        self._statement = f"INSERT INTO {table.name} ({names}) {source}"
        if skips_known:
            self._statement += " ON CONFLICT DO NOTHING"

    def run(self, connection: Connection, rows: Sequence[tuple[Any, ...]]) -> int:
        """Insert rows in the order of the columns; returns how many were new."""
        return _execute(connection, self._statement, rows, is_sqlite=self._is_sqlite)


class BulkUpdate:
    """UPDATE of requests by their id, the last value of each tuple."""

    def __init__(self, database: Database, table: sa.Table, columns: Sequence[str]) -> None:
        self._is_sqlite = database.is_sqlite
        if self._is_sqlite:
            sets = ", ".join(f"{name} = ?" for name in columns)
            self._statement = f"UPDATE {table.name} SET {sets} WHERE id = ?"  # noqa: S608
            return
        sets = ", ".join(f"{name} = given.{name}" for name in columns)
        given = _unnest(database, table, [*columns, "id"])
        self._statement = (
            f"UPDATE {table.name} SET {sets} FROM ({given}) given "  # noqa: S608
            f"WHERE {table.name}.id = given.id AND ({table.name}.id >> {PART_BITS}) = "
        )

    def run(self, connection: Connection, rows: Sequence[tuple[Any, ...]]) -> int:
        """Update rows of (the columns' values, id); returns how many were there."""
        if self._is_sqlite:
            return _execute(connection, self._statement, rows, is_sqlite=True)
        changed = 0
        for part in parts_of_ids([row[-1] for row in rows]):
            own = [row for row in rows if row[-1] >> PART_BITS == part]
            changed += _execute(connection, f"{self._statement}{part}", own, is_sqlite=False)
        return changed


def _execute(
    connection: Connection, statement: str, rows: Sequence[tuple[Any, ...]], *, is_sqlite: bool
) -> int:
    if not rows:
        return 0
    if is_sqlite:
        return connection.exec_driver_sql(statement, list(rows)).rowcount
    columns = tuple(map(list, zip(*rows, strict=True)))
    if sum(map(_size, columns)) <= STATEMENT_BYTES:  # nearly always
        return connection.exec_driver_sql(statement, columns).rowcount
    changed = 0
    for some in _cut(rows):
        columns = tuple(map(list, zip(*some, strict=True)))
        changed += connection.exec_driver_sql(statement, columns).rowcount
    return changed


def _size(column: Sequence[Any]) -> int:
    """The length of a column's strings or bytes; its values are of one type or None.

    Counts a string's characters, not its bytes: that is quick, and too small by a factor of 4 at
    most.
    """
    first = next((value for value in column if value is not None), None)
    return sum(map(len, filter(None, column))) if isinstance(first, str | bytes) else 0


def _cut(rows: Sequence[tuple[Any, ...]]) -> Iterator[Sequence[tuple[Any, ...]]]:
    """Cut the rows into parts whose strings and bytes fit into one statement."""
    begin = total = 0
    for place, row in enumerate(rows):
        size = sum(len(value) for value in row if isinstance(value, str | bytes))
        total += size
        if total > STATEMENT_BYTES and place > begin:
            yield rows[begin:place]
            begin, total = place, size
    yield rows[begin:]


def _marks(columns: Sequence[str]) -> str:
    return ", ".join("?" * len(columns))


def _unnest(database: Database, table: sa.Table, columns: Sequence[str]) -> str:
    """A SELECT of rows from arrays, one a column, which psycopg sends in binary."""
    dialect = database.engine.dialect
    arrays = ", ".join(f"%b::{table.c[name].type.compile(dialect)}[]" for name in columns)
    return f"SELECT * FROM unnest({arrays}) AS given ({', '.join(columns)})"  # noqa: S608
