"""The user's own databases: their URLs, and connections to them."""

import sqlite3
from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.pool import NullPool

from nightjar.jobs.errors import NO_POSTGRES_DRIVER

_FROM_ENVIRONMENT = "env:"
_BUSY_S = 30.0
_CONNECT_S = 10


class DatabaseUrlError(ValueError):
    """A database URL cannot be used; the message says why and never holds the URL."""


def database_url(text: str, environment: Mapping[str, str]) -> URL:
    """The URL that `env:NAME` or a URL without a password stands for.

    Raises:
        DatabaseUrlError: The variable is not set, or the URL is not one of SQLite or PostgreSQL.
    """
    name = text.removeprefix(_FROM_ENVIRONMENT)
    if name != text:
        text = environment.get(name, "")
        if not text:
            raise DatabaseUrlError(f"the environment variable {name} is not set; put the URL there")
    try:
        url = make_url(text)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise DatabaseUrlError(
            "is no database URL; write sqlite:///FILE or postgresql://USER@HOST/NAME"
        ) from error
    if url.password and text != environment.get(name):
        raise DatabaseUrlError(
            "holds a password; put the URL into an environment variable and write env:NAME"
        )
    kind = url.get_backend_name()
    if kind == "sqlite":
        if not (url.database or "").replace(":memory:", ""):
            raise DatabaseUrlError("is a database in memory; name a file")
        return url.set(drivername="sqlite+pysqlite")
    if kind in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    raise DatabaseUrlError(
        f"is for {kind}; SQLite and PostgreSQL are supported: for other databases use Parquet files"
    )


def shown_url(url: URL) -> str:
    """The URL for messages: neither password nor options."""
    return url.set(password=None, query={}, drivername=url.get_backend_name()).render_as_string()


def open_database(url: URL) -> Engine:
    """An engine whose connections are closed after use; transactions of SQLite begin as writers.

    Raises:
        DatabaseUrlError: The driver is not installed.
    """
    is_sqlite = url.get_backend_name() == "sqlite"
    arguments = {"timeout": _BUSY_S} if is_sqlite else {"connect_timeout": _CONNECT_S}
    given = {name: value for name, value in arguments.items() if name not in url.query}
    try:
        engine = sa.create_engine(url, poolclass=NullPool, hide_parameters=True, connect_args=given)
    except ImportError as error:
        raise DatabaseUrlError(f"{NO_POSTGRES_DRIVER}; it says: {error}") from error
    if is_sqlite:
        event.listen(engine, "connect", _leave_transactions_to_us)
        event.listen(engine, "begin", _begin_as_writer)
    return engine


def first_line(error: BaseException) -> str:
    """What the driver says, without the lines that may repeat a row's values."""
    told = str(getattr(error, "orig", None) or error)
    return told.partition("\n")[0]


def _leave_transactions_to_us(connection: sqlite3.Connection, record: object) -> None:
    connection.isolation_level = None  # the driver would not roll a CREATE TABLE back


def _begin_as_writer(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
