"""One database behind the store: its engine, its transactions, its errors.

SQLite runs in WAL mode: readers never wait for the writer, and a write begins
with BEGIN IMMEDIATE, so that it never fails half-way on a lock. PostgreSQL runs
READ COMMITTED; every statement that changes rows locks them in the one order
micro_batch, request, job, so that transactions cannot wait for each other in a
circle.
"""

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, Pool, QueuePool

from nightjar.jobs.errors import (
    NO_POSTGRES_DRIVER,
    NoSessionError,
    StoreError,
    StoreUnavailableError,
    UnusableDatabaseError,
)
from nightjar.jobs.store.priority_turns import PriorityTurns, TurnTimeoutError
from nightjar.jobs.store.tally import Tally
from nightjar.jobs.store.write_lock import begin_soon

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Synchronous = Literal["full", "normal"]

BUSY_TIMEOUT_MS = 30_000
WRITE_ATTEMPTS = 3
CONNECTION_WAIT_S = 30.0
_WAL_RETRY_S = 0.02
# PostgreSQL: deadlock_detected, serialization_failure. The transaction left no trace.
_RETRIABLE = frozenset({"40P01", "40001"})
# idle_in_transaction_session_timeout: the process was stopped, or its network. To the driver it is
# no operational error.
_ENDED_BY_SERVER = "25P03"
# undefined_table, undefined_column.
_UNDEFINED = frozenset({"42P01", "42703"})
# program_limit_exceeded, statement_too_complex: the statement will never do.
_TOO_LARGE = frozenset({"54000", "54001"})


def database_url(url: str) -> URL:
    """The URL with the driver that Nightjar uses; UnusableDatabaseError if it cannot be used."""
    try:
        parsed = make_url(url)
    except sa.exc.ArgumentError as error:
        raise UnusableDatabaseError(
            "the database URL cannot be read; write sqlite:///FILE or postgresql://USER@HOST/NAME"
        ) from error
    kind = parsed.get_backend_name()
    if kind == "sqlite" and not (parsed.database or "").replace(":memory:", ""):
        raise UnusableDatabaseError(
            "a SQLite database in memory cannot be shared by processes; name a file"
        )
    if kind == "sqlite":
        return parsed.set(drivername="sqlite+pysqlite")
    if kind in {"postgresql", "postgres"}:
        return parsed.set(drivername="postgresql+psycopg")
    raise UnusableDatabaseError(f"{kind} is not supported; use SQLite or PostgreSQL")


def open_engine(
    url: URL,
    *,
    pool: type[Pool] = QueuePool,
    synchronous: Synchronous = "full",
    foreign_keys: bool = True,
    limited: bool = True,
    connections: int | None = None,
) -> Engine:
    """An engine with the pragmas and transactions described above.

    limited: Statements end after a while, on PostgreSQL; migrations may take as long as they need.
    connections: The most that are open at a time; None: one for each thread, up to 40.
    """
    options: dict[str, Any] = {"poolclass": pool}
    if pool is not NullPool:
        # One connection a thread that is in a transaction: claims, beats, API threads.
        size, overflow = (8, 32) if connections is None else (connections, 0)
        options |= {"pool_size": size, "max_overflow": overflow, "pool_timeout": CONNECTION_WAIT_S}
    # Statements carry prompts: keep them out of error messages.
    if url.get_backend_name() == "postgresql":
        try:
            from nightjar.jobs.store import postgres  # noqa: PLC0415 - psycopg is an extra
        except ImportError as error:
            raise UnusableDatabaseError(f"{NO_POSTGRES_DRIVER}; it says: {error}") from error

        options["connect_args"] = postgres.connect_args(url)
        engine = sa.create_engine(url, hide_parameters=True, **options)
        postgres.set_limits(engine, statements=limited)
        return engine
    options["connect_args"] = {"timeout": BUSY_TIMEOUT_MS / 1000}
    engine = sa.create_engine(url, hide_parameters=True, **options)

    @event.listens_for(engine, "connect")
    def set_pragmas(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None  # `begin` below writes BEGIN
        # FULL: what was acknowledged survives a power cut. NORMAL may forget the last commits.
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        _use_wal(connection)
        for pragma in (
            f"synchronous = {synchronous}",
            f"foreign_keys = {int(foreign_keys)}",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("nightjar_write")
        # Not within a transaction, where SQLite does not take it; and only where it changes.
        wanted = connection.get_execution_options().get("nightjar_synchronous", synchronous)
        if writes and connection.info.get("synchronous", synchronous) != wanted:
            connection.exec_driver_sql(f"PRAGMA synchronous = {wanted}")
            connection.info["synchronous"] = wanted
        if connection.get_execution_options().get("nightjar_live"):
            begin_soon(connection, BUSY_TIMEOUT_MS)
            return
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _use_wal(connection: sqlite3.Connection) -> None:
    """Keep a write-ahead log; wait for others that are in the file.

    The first change of a file to this mode raises a read lock to a write lock. SQLite then answers
    "locked" at once in the place of waiting for `busy_timeout`.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(_WAL_RETRY_S)
        else:
            return


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise the driver's errors as StoreError, without the statement's parameters."""
    try:
        yield
    except (sa.exc.TimeoutError, TurnTimeoutError) as error:
        raise StoreUnavailableError("every database connection is in use") from error
    except (sa.exc.OperationalError, sa.exc.InterfaceError) as error:
        if getattr(error.orig, "sqlstate", None) in _TOO_LARGE:
            raise StoreError(f"the database refused a statement: {_first_line(error)}") from error
        why = f"{error.orig}{_mend(error)}"
        raise StoreUnavailableError(f"the database is not available: {why}") from error
    except sa.exc.ProgrammingError as error:
        why = f"{_first_line(error)}{_mend(error)}"
        raise StoreError(f"the database refused a statement: {why}") from error
    except sa.exc.DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) == _ENDED_BY_SERVER:
            raise StoreUnavailableError(f"the database ended the session: {error.orig}") from error
        raise StoreError(f"the database refused the data: {_first_line(error)}") from error


def _is_retriable(error: StoreError) -> bool:
    driver_error = getattr(error.__cause__, "orig", None)
    return getattr(driver_error, "sqlstate", None) in _RETRIABLE


def _mend(error: sa.exc.DBAPIError) -> str:
    """A hint for a missing table or column: the database is not migrated."""
    state = getattr(error.orig, "sqlstate", None)
    lacks = state in _UNDEFINED or str(error.orig).startswith(("no such table", "no such column"))
    return "; run `nightjar migrate`" if lacks else ""


def _first_line(error: sa.exc.DBAPIError) -> str:
    # The lines after the first may repeat a row's values.
    return str(error.orig).partition("\n")[0]


def _close_returned(connection: object, record: ConnectionPoolEntry) -> None:
    """Close what comes back to a pool that is no longer there; nobody else would."""
    record.invalidate()


class Database:
    """Transactions on one database; safe to share between threads.

    Args:
        url: The database.
        synchronous: SQLite's mode.
        connections: The most connections to PostgreSQL, at least 2. One of them is kept for what
            waits for no disk: signs of life, claims, single calls. Nothing that a job's results
            wait for delays these.
        direct_url: PostgreSQL itself, where `url` is a pooler's: for what needs a session.
    """

    def __init__(
        self,
        url: str,
        *,
        synchronous: Synchronous = "full",
        connections: int | None = None,
        direct_url: str | None = None,
    ) -> None:
        self.url = database_url(url)
        self.session_url = self.url if direct_url is None else database_url(direct_url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.is_sqlite:  # `nightjar run` is in a file, whatever the settings say of a server
            connections, self.session_url = None, self.url
        self.engine = open_engine(self.url, synchronous=synchronous, connections=connections)
        self._connections = None if connections is None else PriorityTurns(connections, kept=1)
        self._session_engine = self.engine
        if self.session_url != self.url:
            self._session_engine = open_engine(self.session_url, pool=NullPool)
        # PostgreSQL, READ COMMITTED: a transaction around reads would cost two more round trips.
        options = {} if self.is_sqlite else {"isolation_level": "AUTOCOMMIT"}
        self._for_reading = self.engine.execution_options(**options)
        # SQLite admits one writer, and the others poll. With turns the threads queue instead.
        self._writer = PriorityTurns() if self.is_sqlite else None
        self.tally = Tally()

    def close(self) -> None:
        """Close every pooled connection; one that a thread still uses is closed when it is back."""
        event.listen(self.engine, "checkin", _close_returned)
        self._session_engine.dispose()
        self.engine.dispose()

    @contextmanager
    def reading(self, *, probe: bool = False) -> Iterator[Connection]:
        """A connection for reading; on SQLite one snapshot, on PostgreSQL one for each statement.

        probe: Give PostgreSQL only 5 s for each answer, to see whether it is there.
        """
        with translated_errors(), self._connected(self._for_reading, urgent=probe) as connection:
            if probe:
                self._hurry(connection)
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A connection for reading; all reads in the block see one snapshot."""
        if self.is_sqlite:
            with self.reading() as connection:
                yield connection
            return
        with translated_errors(), self._connected(self.engine) as plain:
            yield plain.execution_options(isolation_level="REPEATABLE READ")

    @contextmanager
    def uploading(self) -> Iterator[Connection]:
        """A connection whose statements may take long, for uploads of millions of rows.

        It is a session: what is staged in it stays between its transactions.

        Raises:
            StoreError: A pooler answers, which may lend another session to each transaction.
        """
        with translated_errors(), self._connected(self._session_engine) as connection:
            if self.is_sqlite:
                yield connection
                return
            from nightjar.jobs.store import postgres  # noqa: PLC0415 - psycopg is an extra

            if postgres.is_pooled(connection):
                raise NoSessionError("an upload")
            driver: Any = connection.connection.driver_connection
            postgres.limit_on_server(driver, postgres.BULK_LIMIT_S)
            try:
                yield connection
            except BaseException:
                connection.invalidate()  # the network may have failed: it cannot reset limits
                raise
            connection.rollback()
            postgres.limit_on_server(driver, postgres.STATEMENT_LIMIT_S)

    @contextmanager
    def _connected(self, engine: Engine, *, urgent: bool = False) -> Iterator[Connection]:
        """A connection of the pool; where there are few of them, urgent threads get theirs first.

        A thread holds one at a time: two that wait for a second one would wait for each other.
        """
        turn: AbstractContextManager[None] = nullcontext()
        if self._connections is not None:
            turn = self._connections.turn(urgent=urgent, timeout_s=CONNECTION_WAIT_S)
        with turn, engine.connect() as connection:
            yield connection

    def _hurry(self, connection: Connection) -> None:
        if not self.is_sqlite:
            from nightjar.jobs.store import postgres  # noqa: PLC0415 - psycopg is an extra

            driver: Any = connection.connection.driver_connection
            driver.limit_s = postgres.PROBE_LIMIT_S

    def write(
        self,
        work: Callable[[Connection], Answer],
        *,
        durable: bool = True,
        probe: bool = False,
        live: bool = False,
    ) -> Answer:
        """Run `work` in one transaction; it runs again if PostgreSQL found a deadlock.

        When this returns, everybody sees the commit. With `durable` it is also on the disk.
        Without, a power cut of the database's machine may undo it, and so may a crash of the
        PostgreSQL server: only for what a later pass repairs. `probe` as in `reading`. `live` is of
        a single call: it goes before other writes and is not durable, because its client waits
        for the answer and sends the call again if none comes.
        """
        attempt = 1
        while True:
            try:
                self.tally.begin()
                with translated_errors(), self._transaction(durable, probe, live) as connection:
                    answer = work(connection)
            except StoreError as error:
                if attempt == WRITE_ATTEMPTS or not _is_retriable(error):
                    raise
            else:
                self.tally.commit()
                return answer
            logger.warning("transaction runs again", extra={"action": "transaction_retried"})
            attempt += 1

    @contextmanager
    def _transaction(self, durable: bool, probe: bool, live: bool) -> Iterator[Connection]:
        durable = durable and not live
        options: dict[str, Any] = {"nightjar_write": True, "nightjar_live": live}
        if not durable:
            options["nightjar_synchronous"] = "normal"
        urgent = probe or not durable
        with self._turn(live=live), self._connected(self.engine, urgent=urgent) as plain:
            connection = plain.execution_options(**options)
            if probe:
                self._hurry(connection)
            with connection.begin():
                if not self.is_sqlite:
                    from nightjar.jobs.store import postgres  # noqa: PLC0415 - psycopg is an extra

                    postgres.set_for_transaction(connection, durable=durable)
                yield connection

    def _turn(self, *, live: bool = False) -> AbstractContextManager[None]:
        return nullcontext() if self._writer is None else self._writer.turn(urgent=live)

    @contextmanager
    def landing(self, connection: Connection) -> Iterator[None]:
        """One write transaction on a connection that the caller already holds."""
        with self._turn():
            connection.execution_options(nightjar_write=True)
            try:
                with connection.begin():
                    yield
            finally:
                connection.execution_options(nightjar_write=False)

    def insert(self, table: sa.Table) -> "sqlite.Insert | postgresql.Insert":
        """The dialect's INSERT, which knows ON CONFLICT."""
        return sqlite.insert(table) if self.is_sqlite else postgresql.insert(table)
