"""From the `url` of a task file to a database that rows are read from."""

from collections.abc import Mapping
from pathlib import Path

from nightjar.jobs.errors import NO_POSTGRES_DRIVER
from nightjar.pipeline.tables.databases import DatabaseUrlError, database_url
from nightjar.pipeline.tables.sources.databases import Database
from nightjar.pipeline.tables.sources.piece import SourceError
from nightjar.pipeline.tables.sources.sqlite import Sqlite


def source_database(given: str, folder: Path, environment: Mapping[str, str]) -> Database:
    """Return the database of a URL, or of `env:NAME`; PostgreSQL is not connected to yet.

    Raises:
        SourceError: The URL cannot be used; the message does not hold it.
    """
    try:
        url = database_url(given, environment)
    except DatabaseUrlError as error:
        raise SourceError(f"[source] sql.url: {error}") from error
    if url.get_backend_name() == "sqlite":
        return Sqlite((folder / (url.database or "")).resolve())
    try:
        from nightjar.pipeline.tables.sources.postgres import Postgres  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise SourceError(NO_POSTGRES_DRIVER) from error
    return Postgres(url)
