"""The tables of a SQL sink: as they are to be, as they are found, and what differs."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.engine.interfaces import ReflectedColumn

from nightjar.pipeline.tables.sinks.sink import SinkRefusedError
from nightjar.pipeline.tables.sinks.sql_types import accepted, made_type

UPTO = "nightjar_upto"
"""A column of the staging table: the row index of the last result that came with the row."""

_PREFIX = "nightjar_staged"


@dataclass(frozen=True, slots=True)
class Target:
    """A table of the user's database that results go to."""

    table: sa.Table
    keys: tuple[str, ...]
    exists: bool

    @property
    def name(self) -> str:
        """For messages."""
        return self.table.fullname

    @property
    def answers(self) -> list[str]:
        """The columns that are no keys."""
        return [column.name for column in self.table.columns if column.name not in self.keys]


def find_target(
    connection: Connection, name: str, schema: pa.Schema, keys: Sequence[str], *, create: bool
) -> Target:
    """The table of this name with the columns that are written.

    Raises:
        SinkRefusedError: It is missing and may not be made, or its columns do not fit; the message
            names each column that does not.
    """
    is_sqlite = connection.dialect.name == "sqlite"
    within, plain = _split(name, is_sqlite)
    inspector = sa.inspect(connection)
    if plain in inspector.get_view_names(within):
        raise SinkRefusedError(f"{name} is a view; name a table")
    if inspector.has_table(plain, within):
        found = {one["name"]: one for one in inspector.get_columns(plain, within)}
        if problems := _problems(found, schema, keys, is_sqlite):
            told = "; ".join(problems)
            raise SinkRefusedError(
                f"the table {name} does not fit: {told}; correct it, or name another"
            )
        if frozenset(keys) not in _unique_sets(inspector, plain, within):
            raise SinkRefusedError(
                f"the table {name} has no primary key or unique constraint on exactly "
                f"({', '.join(keys)}); add one, so that each key has one row"
            )
        columns = [sa.Column(field.name, found[field.name]["type"]) for field in schema]
        return Target(_table(plain, within, columns), tuple(keys), exists=True)
    if not create:
        raise SinkRefusedError(f"there is no table {name}; make it, or set create = true")
    try:
        columns = [_made_column(field, keys, is_sqlite) for field in schema]
    except ValueError as error:
        raise SinkRefusedError(str(error)) from error
    return Target(_table(plain, within, columns), tuple(keys), exists=False)


def staging_table(target: Target, full: pa.Schema, run: str, *, is_sqlite: bool) -> sa.Table:
    """The table in which the results of this run are collected; answers and errors together."""
    known = {column.name: column.type for column in target.table.columns}
    columns = [
        sa.Column(field.name, known.get(field.name) or made_type(field.type, is_sqlite=is_sqlite))
        for field in full
    ]
    name = f"{prefix_of(target.name)}{_digest(run)}"
    columns = [sa.Column(UPTO, sa.BigInteger, nullable=False), *columns]
    # Filled again when the server has crashed: it needs no log.
    return _table(name, target.table.schema, columns, prefixes=[] if is_sqlite else ["UNLOGGED"])


def prefix_of(table: str) -> str:
    """With what the names of all staging tables of this table begin."""
    return f"{_PREFIX}_{_digest(table)}_"


def _table(
    name: str, schema: str | None, columns: Sequence[sa.Column[Any]], prefixes: Sequence[str] = ()
) -> sa.Table:
    return sa.Table(name, sa.MetaData(), *columns, schema=schema, prefixes=list(prefixes))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def _split(name: str, is_sqlite: bool) -> tuple[str | None, str]:
    within, _, plain = name.rpartition(".")
    if within and is_sqlite:
        raise SinkRefusedError(f"{name}: SQLite has no schemas; name a table without a dot")
    return within or None, plain


def _made_column(field: pa.Field, keys: Sequence[str], is_sqlite: bool) -> sa.Column[Any]:
    is_key = field.name in keys
    type_ = made_type(field.type, is_sqlite=is_sqlite)
    return sa.Column(
        field.name, type_, primary_key=is_key, nullable=not is_key, autoincrement=False
    )


def _problems(
    found: dict[str, ReflectedColumn], schema: pa.Schema, keys: Sequence[str], is_sqlite: bool
) -> list[str]:
    problems = []
    for field in schema:
        column, is_key = found.get(field.name), field.name in keys
        wanted = made_type(field.type, is_sqlite=is_sqlite)
        if column is None:
            problems.append(f"the column {field.name} ({wanted!r}) is missing")
        elif not accepted(column["type"], field.type, is_sqlite=is_sqlite, is_key=is_key):
            problems.append(
                f"the column {field.name} is {column['type']!r}, and should be {wanted!r}"
            )
        elif not is_key and not column["nullable"]:
            problems.append(f"the column {field.name} should allow nulls: a failed row has none")
    ours = set(schema.names)
    for name, column in found.items():
        has_value = column["nullable"] or column["default"] is not None or column.get("identity")
        if name not in ours and not has_value and not column.get("computed"):
            problems.append(f"the column {name} gets no value: give it a default, or allow nulls")
    return problems


def _unique_sets(inspector: sa.Inspector, name: str, schema: str | None) -> set[frozenset[Any]]:
    """The sets of columns that identify a row."""
    constraints: list[Any] = [inspector.get_pk_constraint(name, schema)["constrained_columns"]]
    constraints += [one["column_names"] for one in inspector.get_unique_constraints(name, schema)]
    indexes = inspector.get_indexes(name, schema)
    constraints += [one["column_names"] for one in indexes if one["unique"]]
    return {frozenset(columns) for columns in constraints}
