"""Connections to PostgreSQL: their time limits, and what the server prepares for them.

The server ends a statement that takes too long or waits too long for a lock. If the network stands
still, its answer does not arrive. Behind a frozen proxy that still acknowledges every packet,
neither keepalives nor `tcp_user_timeout` notice. So each wait for an answer has a limit here, too,
and the connection is closed after it.

The server prepares statements that are used often: to parse and plan each anew took a quarter of
its time. It keeps the plan until the next ANALYZE. By then a table may have grown from nothing to a
million rows, and a plan for a small table scans all of them. So a connection drops its
plans every second, and the server makes them again by the tables' sizes. That also shows whether
the server is still there. Behind a pooler that lends another session to each transaction nothing is
prepared.
"""

import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.abc import PQGen
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry

Given = TypeVar("Given")

PROBE_LIMIT_S = 5.0
"""For the ping before a connection is used, for `/health` and for a heartbeat."""

STATEMENT_LIMIT_S = 60.0
BULK_LIMIT_S = 1800.0
"""For a statement that lands an upload of millions of rows."""

_LOCK_LIMIT_S = 30.0
# Between the statements of a transaction. If a client loses its power or its network, the server
# hears nothing and would keep the locks for two hours. Shorter than the limit above, so that those
# who wait for the locks get them.
_IDLE_LIMIT_S = 15.0
_MARGIN_S = 10.0  # the server's limit comes first: its error says more

TRUSTED_S = 1.0
"""So long after it has answered, a connection is used without a look whether it still does."""

_SET_LIMITS = (
    "SELECT set_config(name, value, false) "
    "FROM unnest(%s::text[], %s::text[]) AS limits (name, value)"
)
_PREPARED_AFTER = 5  # uses of a statement
_POOLED = "nightjar_pooled"  # kept with the pooled connection
_TRUSTED_UNTIL = "nightjar_trusted_until"  # kept with the pooled connection, in monotonic seconds

# The URL may override them.
_TCP = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}


class LimitedConnection(psycopg.Connection[Any]):
    """A connection that is closed when an answer does not come within `limit_s` seconds."""

    limit_s: float | None = PROBE_LIMIT_S

    def wait(self, gen: PQGen[Given], interval: float = 0.1, timeout: float | None = None) -> Given:
        """Wait for the server, as psycopg does; OperationalError after the limit."""
        try:
            return super().wait(gen, interval, self.limit_s if timeout is None else timeout)
        except errors._WaitTimeout as error:
            if timeout is not None:
                raise
            self.pgconn.finish()
            raise psycopg.OperationalError(f"no answer for {self.limit_s:.0f} s") from error


def connect_args(url: URL) -> dict[str, Any]:
    """The arguments that psycopg gets beside the URL."""
    given = {name: value for name, value in _TCP.items() if name not in url.query}
    return {"prepare_threshold": None, **given}  # until it is known who answers


def set_limits(engine: Engine, *, statements: bool) -> None:
    """Limit how long the engine's connections wait; `statements` is False for migrations."""

    @event.listens_for(engine, "do_connect")
    def connect(
        dialect: object, record: object, arguments: list[Any], options: dict[str, Any]
    ) -> LimitedConnection:
        return LimitedConnection.connect(*arguments, **options)

    @event.listens_for(engine, "connect")
    def begin(connection: LimitedConnection, record: ConnectionPoolEntry) -> None:
        if not statements:
            connection.limit_s = None
            return
        with _translated("pg_backend_pid"):
            record.info[_POOLED] = not is_direct(connection)
        if record.info[_POOLED]:
            return
        connection.prepare_threshold = _PREPARED_AFTER
        if "statement_timeout" not in str(engine.url.query.get("options", "")):
            limit_on_server(connection, STATEMENT_LIMIT_S)

    if not statements:
        return

    # Between uses the shorter limit holds, for the ping before the next one.
    @event.listens_for(engine, "checkout")
    def use(connection: LimitedConnection, record: ConnectionPoolEntry, proxy: object) -> None:
        _look(connection, record)
        connection.limit_s = STATEMENT_LIMIT_S + _MARGIN_S

    @event.listens_for(engine, "checkin")
    def put_back(connection: LimitedConnection | None, record: object) -> None:
        if connection is not None:  # else it was lost
            connection.limit_s = PROBE_LIMIT_S


def is_direct(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server itself answers: a pooler tells clients a process number of its own."""
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    connection.commit()
    return row is not None and row[0] == connection.info.backend_pid


def is_pooled(connection: Connection) -> bool:
    """Whether a pooler answers, which may lend another session to each transaction."""
    return bool(connection.info.get(_POOLED))


def set_for_transaction(connection: Connection, *, durable: bool) -> None:
    """Set what a transaction that writes has for itself: limits behind a pooler, durability."""
    settings = _limits(STATEMENT_LIMIT_S) if is_pooled(connection) else {}
    if not durable:
        settings["synchronous_commit"] = "off"
    if settings:
        # Without parameters the server takes all of them at once.
        sql = "; ".join(f"SET LOCAL {name} TO {value}" for name, value in settings.items())
        connection.exec_driver_sql(sql)


def _look(connection: LimitedConnection, record: ConnectionPoolEntry) -> None:
    """See whether the server still answers, unless it has just done so, and drop its old plans.

    Raises:
        DisconnectionError: The connection is lost; the pool then gives another one.
    """
    until = record.info.get(_TRUSTED_UNTIL)
    if until is None:  # a new one: the pool gives up after two that are lost
        record.info[_TRUSTED_UNTIL] = time.monotonic() + TRUSTED_S
        return
    if time.monotonic() < until and not _says_something(connection):
        return
    try:
        # A pooler's sessions are of others, too: their plans stay.
        connection.execute("SELECT 1" if record.info[_POOLED] else "DISCARD PLANS", prepare=False)
        connection.commit()
    except psycopg.Error as error:
        raise DisconnectionError from error
    record.info[_TRUSTED_UNTIL] = time.monotonic() + TRUSTED_S


def _says_something(connection: LimitedConnection) -> bool:
    """Whether the server has sent anything by itself: mostly that it ends the connection."""
    poll = select.poll()
    poll.register(connection.pgconn.socket, select.POLLIN)
    return bool(poll.poll(0))


def limit_on_server(connection: LimitedConnection, limit_s: float) -> None:
    """Let the server end statements after `limit_s`; this side waits a little longer."""
    limits = _limits(limit_s)
    connection.limit_s = PROBE_LIMIT_S
    names, values = list(limits), list(limits.values())
    with _translated("set_config"):
        connection.execute(_SET_LIMITS, (names, values))
        connection.commit()
    connection.limit_s = limit_s + _MARGIN_S


def _limits(statement_s: float) -> dict[str, str]:
    """The server's limits by their names, in milliseconds."""
    seconds = {
        "statement_timeout": statement_s,
        "lock_timeout": _LOCK_LIMIT_S,
        "idle_in_transaction_session_timeout": _IDLE_LIMIT_S,
    }
    return {name: f"{value * 1000:.0f}" for name, value in seconds.items()}


@contextmanager
def _translated(statement: str) -> Iterator[None]:
    """Raise the driver's errors as SQLAlchemy's: it translates those of its own calls alone."""
    try:
        yield
    except psycopg.Error as error:
        raise DBAPIError.instance(
            statement, None, error, psycopg.Error, hide_parameters=True
        ) from error
