"""Staging: an upload's rows wait in a temporary table of the submitter's own connection.

There they hold no lock that others wait for. They go when the submitter is done.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.equality import asked_without_seed, digest, with_own_content_key
from nightjar.jobs.records import JsonObject, NewRequest, RejectedRow
from nightjar.jobs.store.bodies import dump_body
from nightjar.jobs.store.columns import BigId
from nightjar.jobs.store.database import Database

# Not part of the schema: Alembic must not see it.
staged = sa.Table(
    "nightjar_staged_row",
    sa.MetaData(),
    sa.Column("row_index", BigId, primary_key=True, autoincrement=False),
    sa.Column("line", sa.BigInteger, nullable=False),
    sa.Column("custom_id", sa.Text),
    sa.Column("kind", sa.String(32)),
    sa.Column("body", sa.Text),
    sa.Column("error_code", sa.String(64)),  # null: accepted so far
    sa.Column("error_message", sa.Text),
    sa.Column("error_param", sa.Text),
    sa.Column("digest", sa.LargeBinary),  # the same for requests that may be merged
    prefixes=["TEMPORARY"],
)


def stage(
    database: Database,
    connection: Connection,
    rows: Sequence[NewRequest | RejectedRow],
    *,
    tenant: str,
    merge_equal: bool,
) -> None:
    """Insert rows of a tenant into the staging table, in a transaction."""
    values = [_staged_row(row, tenant, merge_equal=merge_equal) for row in rows]
    with connection.begin():
        if database.is_sqlite:
            marks = ", ".join("?" * len(staged.c))
            insert = f"INSERT INTO {staged.name} VALUES ({marks})"  # noqa: S608
            connection.exec_driver_sql(insert, values)
            return
        _copy(connection, values)


def _copy(connection: Connection, rows: list[tuple[Any, ...]]) -> None:
    """Insert with COPY, PostgreSQL's fastest way, which SQLAlchemy does not have."""
    cursor: Any = connection.connection.cursor()
    driver_error = connection.dialect.loaded_dbapi.Error
    try:
        with cursor, cursor.copy(f"COPY {staged.name} FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
    except driver_error as error:
        raise sa.exc.DBAPIError.instance(
            "COPY", None, error, driver_error, hide_parameters=True
        ) from error


def drop_stage(connection: Connection) -> None:
    """Drop the staging table; a connection that is broken leaves the pool."""
    try:
        connection.rollback()
        staged.drop(connection)
        connection.commit()
    except sa.exc.DBAPIError:
        connection.invalidate()


def _staged_row(
    row: NewRequest | RejectedRow, tenant: str, *, merge_equal: bool
) -> tuple[Any, ...]:
    """The row's values in the order of the staging table's columns."""
    if isinstance(row, RejectedRow):
        error = (row.code, row.message, row.param)
        return (row.index, row.line, row.custom_id, None, None, *error, None)
    own = with_own_content_key(row.body, tenant)
    body = dump_body(own)
    same = _digest(own, body) if merge_equal else None
    return (row.index, row.line, row.custom_id, row.kind.value, body, None, None, None, same)


def _digest(body: JsonObject, dumped: str) -> bytes | None:
    """The digest of a body whose JSON is `dumped`; None for one that cannot be merged."""
    asked = asked_without_seed(body)
    if asked is None:
        return None
    return digest(dumped if asked is body else dump_body(asked))
