"""Reads a query of PostgreSQL through a cursor on the server. Imports psycopg, an extra."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import conninfo, sql
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.engine import URL

from nightjar.pipeline.tables.databases import shown_url
from nightjar.pipeline.tables.sources.databases import (
    WRITES,
    LostConnectionError,
    QueryTooLongError,
    Row,
)
from nightjar.pipeline.tables.sources.piece import SourceError
from nightjar.pipeline.tables.sources.postgres_arrow import arrow_reading

_CONNECT_S = 15
_CURSOR = "nightjar_source"
# By PostgreSQL's numbers of types. Others are read as text: numeric, uuid, json, enumerations.
_TYPES: dict[int, pa.DataType] = {
    16: pa.bool_(),
    17: pa.binary(),
    20: pa.int64(),
    21: pa.int64(),
    23: pa.int64(),
    26: pa.int64(),
    700: pa.float64(),
    701: pa.float64(),
    1082: pa.date32(),
    1114: pa.timestamp("us"),
    1184: pa.timestamp("us", "UTC"),
    **dict.fromkeys((1005, 1007, 1016), pa.list_(pa.int64())),
    **dict.fromkeys((1021, 1022), pa.list_(pa.float64())),
    **dict.fromkeys((1009, 1015), pa.list_(pa.string())),
}


class Postgres:
    """One database."""

    can_lose_connections = True

    def __init__(self, url: URL) -> None:
        dialect: Any = PGDialect_psycopg  # partly typed
        given: dict[str, Any] = dialect().create_connect_args(url)[1]
        self._connecting: dict[str, Any] = {"connect_timeout": _CONNECT_S, **given}
        self.place = shown_url(url)

    @contextmanager
    def reading(self, query: str, timeout_s: int, values: Sequence[Any] = ()) -> Iterator["_Fetch"]:
        """Run a query within a time."""
        connection = self._connect(timeout_s)
        cursor = connection.cursor(_CURSOR)
        try:
            # Without values psycopg leaves a percent sign as it is.
            cursor.execute(_plain(query).encode(), values or None)
            yield _Fetch(cursor)
        except psycopg.Error as error:
            raise _translated(connection, error) from None
        finally:
            connection.close()  # first: the server may be gone, and has nothing to be told
            cursor.close()

    def ordered(self, query: str, key: Sequence[str], after: Row | None) -> tuple[str, list[Any]]:
        """Return the query in the order of its key, nulls last, from this key on."""
        names = [sql.Identifier(name) for name in key]
        text, values = _plain(query), list[Any]()
        where: sql.Composable = sql.SQL("")
        if after is not None:
            text = text.replace("%", "%%")  # psycopg looks for values from now on
            condition, values = _from_key(names, after)
            where = sql.SQL("WHERE ") + condition
        # On lines of its own: the query may end with a comment.
        whole = sql.SQL("SELECT * FROM (\n{}\n) AS nightjar_rows {} ORDER BY {}").format(
            _UserQuery(text), where, sql.SQL(", ").join(names)
        )
        return whole.as_string(), values

    def arrow(
        self, query: str, timeout_s: int, schema: pa.Schema
    ) -> AbstractContextManager[Iterator[pa.RecordBatch]]:
        """Run a query within a time, and give its rows as batches of this schema."""
        place = conninfo.make_conninfo(**self._connecting)
        return arrow_reading(place, query, timeout_s, schema)

    def _connect(self, timeout_s: int) -> "psycopg.Connection[Row]":
        try:
            connection: psycopg.Connection[Row] = psycopg.connect(**self._connecting)
            with suppress_closing(connection):
                # Of the session: not even a query that ends this transaction can write.
                connection.execute("SET default_transaction_read_only = on")
                connection.execute(f"SET statement_timeout = {timeout_s * 1_000}".encode())
                connection.commit()
                connection.read_only = True
                connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        except psycopg.Error as error:
            raise LostConnectionError(f"{self.place}: {_first_line(error)}") from None
        return connection


@contextmanager
def suppress_closing(connection: "psycopg.Connection[Row]") -> Iterator[None]:
    """Close a connection that could not be made ready."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


class _UserQuery(sql.Composable):
    """The user's own text, which is part of a statement as it is."""

    def as_bytes(self, context: Any = None) -> bytes:  # noqa: ANN401 - psycopg's signature
        """Return the text."""
        del context
        return str(self._obj).encode()


class _Fetch:
    def __init__(self, cursor: "psycopg.ServerCursor[Row]") -> None:
        description = cursor.description or []
        self._cursor = cursor
        self.names = [column.name for column in description]
        self.types = [_TYPES.get(column.type_code, pa.string()) for column in description]

    def next(self, most: int) -> Sequence[Row]:
        return self._cursor.fetchmany(most)


def _plain(query: str) -> str:
    return query.strip().rstrip(";").rstrip()


def _from_key(names: Sequence[sql.Identifier], after: Row) -> tuple[sql.Composable, list[Any]]:
    """Return the condition for rows with this key or a later one, where nulls are the last."""
    name, value = names[0], after[0]
    rest: sql.Composable | None = None
    more: list[Any] = []
    if len(names) > 1:
        rest, more = _from_key(names[1:], after[1:])
    if value is None:
        only = sql.SQL("{} IS NULL").format(name)
        return (only, []) if rest is None else (sql.SQL("({} AND {})").format(only, rest), more)
    if rest is None:
        return sql.SQL("({0} >= %s OR {0} IS NULL)").format(name), [value]
    later = sql.SQL("({0} > %s OR {0} IS NULL OR ({0} = %s AND {1}))").format(name, rest)
    return later, [value, value, *more]


def _translated(connection: "psycopg.Connection[Row]", error: psycopg.Error) -> Exception:
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return SourceError(WRITES)
    if isinstance(error, psycopg.errors.QueryCanceled):
        return QueryTooLongError()
    if connection.broken or connection.closed:
        return LostConnectionError(_first_line(error))
    return SourceError(
        f"the query fails: {_first_line(error)}; give one SELECT that the database takes"
    )


def _first_line(error: psycopg.Error) -> str:
    """Return what the server says, without the query's text that follows."""
    told = error.diag.message_primary or str(error)
    return told.strip().partition("\n")[0]
