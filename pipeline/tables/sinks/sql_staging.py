"""The staging table of a SQL sink: filled in transactions of bounded size, and continued."""

from itertools import repeat
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.pipeline.tables.sinks.batches import Piece
from nightjar.pipeline.tables.sinks.columns import ERRORS
from nightjar.pipeline.tables.sinks.sql_tables import (
    UPTO,
    Target,
    prefix_of,
    staging_table,
)
from nightjar.pipeline.tables.sinks.sql_types import sql_values


class Staging:
    """The staging table of one run and one target.

    Args:
        connection: Every method works in its transaction.
        target: The table of the answers.
        schema: Keys, answers and errors.
        run: Names the results.
    """

    def __init__(self, connection: Connection, target: Target, schema: pa.Schema, run: str) -> None:
        self._connection = connection
        self._target = target
        self._is_sqlite = connection.dialect.name == "sqlite"
        self.table = staging_table(target, schema, run, is_sqlite=self._is_sqlite)

    def create(self) -> None:
        """Make the table, if it is not there."""
        self.table.create(self._connection, checkfirst=True)

    def drop(self) -> None:
        """Remove the table."""
        self.table.drop(self._connection)

    def drop_others(self) -> None:
        """Remove what killed runs with other results have left."""
        prefix, schema = prefix_of(self._target.name), self.table.schema
        for name in sa.inspect(self._connection).get_table_names(schema):
            if name.startswith(prefix) and name != self.table.name:
                sa.Table(name, sa.MetaData(), schema=schema).drop(self._connection)

    def last(self) -> int:
        """The row index up to which results are staged; -1 if none is."""
        if not sa.inspect(self._connection).has_table(self.table.name, self.table.schema):
            return -1
        found = self._connection.scalar(sa.select(sa.func.max(self.table.c[UPTO])))
        return -1 if found is None else int(found)

    def counts(self) -> tuple[int, int]:
        """How many successes and failures are staged."""
        code = self.table.c[ERRORS[0]]
        counted = sa.select(sa.func.count(), sa.func.count(code)).select_from(self.table)
        total, failed = self._connection.execute(counted).one()
        return total - failed, failed

    def add(self, piece: Piece) -> None:
        """Add the rows of a piece; raises an error of the driver or of SQLAlchemy."""
        batch = piece.table
        columns = [sql_values(column, is_sqlite=self._is_sqlite) for column in batch.columns]
        rows = list(zip(repeat(piece.last_index, batch.num_rows), *columns, strict=True))
        if rows and self._is_sqlite:
            insert = str(sa.insert(self.table).compile(dialect=self._connection.dialect))
            self._connection.exec_driver_sql(insert, rows)
        elif rows:
            driver: Any = self._connection.connection.driver_connection
            name = self._connection.dialect.identifier_preparer.format_table(self.table)
            with driver.cursor() as cursor, cursor.copy(f"COPY {name} FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)


def set_up(connection: Connection, target: Target, errors: Target | None) -> None:
    """Make the tables that are missing."""
    for one in (target, errors):
        if one is not None and not one.exists:
            one.table.create(connection)
