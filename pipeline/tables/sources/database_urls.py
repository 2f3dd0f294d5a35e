"""From the `url` of a task file to a database."""

from collections.abc import Mapping
from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from nightjar.jobs.errors import NO_POSTGRES_DRIVER
from nightjar.pipeline.tables.sources.databases import Database
from nightjar.pipeline.tables.sources.piece import SourceError
from nightjar.pipeline.tables.sources.sqlite import Sqlite

_ENVIRONMENT = "env:"


def open_database(given: str, folder: Path, environment: Mapping[str, str]) -> Database:
    """Return the database of a URL, or of `env:NAME`; PostgreSQL is not connected to yet.

    Raises:
        SourceError: The URL cannot be used; the message does not hold it.
    """
    text = given
    if given.startswith(_ENVIRONMENT):
        name = given.removeprefix(_ENVIRONMENT)
        text = environment.get(name, "")
        if not text:
            raise SourceError(
                f"the environment variable {name}, which holds the database's URL, is not set"
            )
    try:
        url = make_url(text)
    except ArgumentError:
        raise SourceError("url is no database URL; write such as postgresql://host/name") from None
    if text == given and (url.password is not None or "password" in url.query):
        raise SourceError(
            "url holds a password; put the URL into an environment variable, and write "
            '"env:NAME" with its name instead'
        )
    return _of_backend(url, folder)


def _of_backend(url: URL, folder: Path) -> Database:
    backend = url.get_backend_name()
    if backend == "sqlite":
        if not url.database or url.database == ":memory:":
            raise SourceError("url names no SQLite file; write sqlite:///path/to/file.db")
        return Sqlite((folder / url.database).resolve())
    if backend != "postgresql":
        raise SourceError(
            f"{backend} databases are not supported; use PostgreSQL or SQLite, or export to Parquet"
        )
    try:
        from nightjar.pipeline.tables.sources.postgres import Postgres  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise SourceError(NO_POSTGRES_DRIVER) from error
    return Postgres(url)
