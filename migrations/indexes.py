"""Builds and drops indexes of tables in use without blocking readers or writers.

PostgreSQL builds an index CONCURRENTLY, outside a transaction, while others read and write. A plain
build would block all writes until it is done. An interrupted build leaves an invalid index, which
the next run drops and builds again. So all that a revision does before an index must be safe to do
twice. SQLite has one writer at a time in any case.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

_INVALID = sa.text(
    "SELECT 1 FROM pg_index WHERE indexrelid = to_regclass(:name) AND NOT indisvalid"
)


def is_postgres() -> bool:
    """Whether the revision runs on PostgreSQL."""
    return op.get_bind().dialect.name == "postgresql"


def add_column(table: str, column: sa.Column[Any]) -> None:
    """Add a column, in a revision that builds an index; it may be there from an interrupted run."""
    op.add_column(table, column, if_not_exists=True if is_postgres() else None)


def create_index(
    name: str,
    table: str,
    columns: Sequence[str],
    where: sa.TextClause | None = None,
    *,
    unique: bool = False,
) -> None:
    """Build an index, with the condition `where` if there is one."""
    if not is_postgres():
        op.create_index(name, table, list(columns), unique=unique, sqlite_where=where)
        return
    with op.get_context().autocommit_block():
        before = _wait_for_others()
        if op.get_bind().execute(_INVALID, {"name": name}).first() is not None:
            op.drop_index(name, table, postgresql_concurrently=True, if_exists=True)
        op.create_index(
            name,
            table,
            list(columns),
            unique=unique,
            postgresql_where=where,
            postgresql_concurrently=True,
            if_not_exists=True,
        )
        op.execute(f"SET lock_timeout = '{before}'")


def drop_index(name: str, table: str) -> None:
    """Drop an index; one that is gone already is no error on PostgreSQL."""
    if not is_postgres():
        op.drop_index(name, table)
        return
    with op.get_context().autocommit_block():
        before = _wait_for_others()
        op.drop_index(name, table, postgresql_concurrently=True, if_exists=True)
        op.execute(f"SET lock_timeout = '{before}'")


def _wait_for_others() -> str:
    """Lift the limit on locks, and return it.

    A CONCURRENTLY statement waits for all running transactions, and no other one waits for it.
    """
    before = str(op.get_bind().scalar(sa.text("SHOW lock_timeout")))
    op.execute("SET lock_timeout = 0")
    return before
