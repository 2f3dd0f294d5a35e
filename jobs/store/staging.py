"""Staging: an upload's rows wait in temporary tables of the submitter's own connection.

There they hold no lock that others wait for. They go when the submitter is done.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.equality import asked_without_seed, digest, with_own_content_key
from nightjar.jobs.records import JsonObject, NewRequest, RejectedRow
from nightjar.jobs.store.bodies import dump_body
from nightjar.jobs.store.columns import BigId
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.packs import cut, pack
from nightjar.jobs.store.parts import part_of_job
from nightjar.jobs.store.tables import body_pack

_LAST = 2**63 - 1  # the index of the last row that a job could have

# Not part of the schema: Alembic must not see it.
staged = sa.Table(
    "nightjar_staged_row",
    sa.MetaData(),
    sa.Column("row_index", BigId, primary_key=True, autoincrement=False),
    sa.Column("line", sa.BigInteger, nullable=False),
    sa.Column("custom_id", sa.Text),
    sa.Column("kind", sa.String(32)),
    sa.Column("error_code", sa.String(64)),  # null: accepted so far
    sa.Column("error_message", sa.Text),
    sa.Column("error_param", sa.Text),
    sa.Column("digest", sa.LargeBinary),  # the same for requests that may be merged
    prefixes=["TEMPORARY"],
)
# The bodies of these rows, as `body_pack` has them.
staged_pack = sa.Table(
    "nightjar_staged_pack",
    sa.MetaData(),
    sa.Column("first_row", BigId, primary_key=True, autoincrement=False),
    sa.Column("rows", sa.Integer, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("packed", sa.LargeBinary, nullable=False),
    prefixes=["TEMPORARY"],
)


def create_stage(connection: Connection) -> None:
    """Create the staging tables, in a transaction of their own."""
    for table in (staged, staged_pack):
        table.create(connection)
    connection.commit()


def stage(
    database: Database,
    connection: Connection,
    rows: Sequence[NewRequest | RejectedRow],
    *,
    tenant: str,
    merge_equal: bool,
) -> None:
    """Insert rows of a tenant into the staging tables, in a transaction.

    Their indexes are consecutive.
    """
    values: list[tuple[Any, ...]] = []
    bodies: list[bytes] = []
    for row in rows:
        if isinstance(row, RejectedRow):
            error = (row.code, row.message, row.param)
            values.append((row.index, row.line, row.custom_id, None, *error, None))
            bodies.append(b"")
            continue
        own = with_own_content_key(row.body, tenant)
        body = dump_body(own)
        same = _digest(own, body) if merge_equal else None
        values.append((row.index, row.line, row.custom_id, row.kind.value, None, None, None, same))
        bodies.append(body.encode())
    packs = list(_packs(rows[0].index, bodies)) if rows else []
    with connection.begin():
        _insert(database, connection, staged, values)
        _insert(database, connection, staged_pack, packs)


def _packs(first: int, bodies: Sequence[bytes]) -> Iterator[tuple[int, int, int, bytes]]:
    """The rows of `staged_pack` for the bodies of rows from `first` on."""
    for part in cut([len(body) for body in bodies]):
        some = bodies[part]
        if size := sum(map(len, some)):
            yield first + part.start, len(some), size, pack(some)


def _insert(
    database: Database, connection: Connection, table: sa.Table, values: list[tuple[Any, ...]]
) -> None:
    if not values:
        return
    if database.is_sqlite:
        marks = ", ".join("?" * len(table.c))
        insert = f"INSERT INTO {table.name} VALUES ({marks})"  # noqa: S608
        connection.exec_driver_sql(insert, values)
    else:
        _copy(connection, table, values)


def _copy(connection: Connection, table: sa.Table, rows: list[tuple[Any, ...]]) -> None:
    """Insert with COPY, PostgreSQL's fastest way, which SQLAlchemy does not have."""
    cursor: Any = connection.connection.cursor()
    driver_error = connection.dialect.loaded_dbapi.Error
    try:
        with cursor, cursor.copy(f"COPY {table.name} FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
    except driver_error as error:
        raise sa.exc.DBAPIError.instance(
            "COPY", None, error, driver_error, hide_parameters=True
        ) from error


def insert_packs(connection: Connection, job_id: str, first: int = 0, last: int = _LAST) -> None:
    """Land the staged bodies of a job, of the packs that begin in these rows."""
    row = staged_pack.c
    landed = {
        "job_id": sa.literal(job_id),
        "first_row": row.first_row,
        "part": sa.literal(part_of_job(job_id), sa.BigInteger),
        "rows": row.rows,
        "bytes": row.bytes,
        "packed": row.packed,
    }
    some = sa.select(*landed.values()).where(row.first_row.between(first, last))
    connection.execute(sa.insert(body_pack).from_select(list(landed), some))


def drop_stage(connection: Connection) -> None:
    """Drop the staging tables; a connection that is broken leaves the pool."""
    try:
        connection.rollback()
        for table in (staged, staged_pack):
            table.drop(connection)
        connection.commit()
    except sa.exc.DBAPIError:
        connection.invalidate()


def _digest(body: JsonObject, dumped: str) -> bytes | None:
    """The digest of a body whose JSON is `dumped`; None for one that cannot be merged."""
    asked = asked_without_seed(body)
    if asked is None:
        return None
    return digest(dumped if asked is body else dump_body(asked))
