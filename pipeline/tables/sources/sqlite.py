"""Reads a query of a SQLite file, which is opened for reading alone."""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from nightjar.pipeline.tables.sources.databases import WRITES, QueryTooLongError, Row
from nightjar.pipeline.tables.sources.piece import SourceError

_STEPS = 10_000  # of SQLite's machine between two looks at the clock


class Sqlite:
    """One file."""

    can_lose_connections = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self.place = f"sqlite:///{path}"
        if not path.is_file():
            raise SourceError(f"{self.place}: there is no such file")

    @contextmanager
    def reading(self, query: str, timeout_s: int, values: Sequence[Any] = ()) -> Iterator["_Fetch"]:
        """Run a query within a time."""
        deadline = time.monotonic() + timeout_s
        uri = f"file:{quote(str(self._path))}?mode=ro"
        try:
            with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
                connection.execute("PRAGMA query_only = 1")
                connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
                yield _Fetch(connection.execute(query, values))
        except (sqlite3.Error, sqlite3.Warning) as error:
            told = str(error)
            if "readonly" in told or "read-only" in told:
                raise SourceError(WRITES) from None
            if "interrupted" in told:
                raise QueryTooLongError from None
            raise SourceError(f"{self.place}: the query fails: {told}; correct it") from None

    def ordered(self, query: str, key: Sequence[str], after: Row | None) -> tuple[str, list[Any]]:
        """Return the query as it is: a file is not lost."""
        del key, after
        return query, []

    def arrow(self, query: str, timeout_s: int, schema: pa.Schema) -> None:
        """Return None: the driver has no Arrow."""


class _Fetch:
    types = None

    def __init__(self, cursor: sqlite3.Cursor) -> None:
        if cursor.description is None:
            raise SourceError(WRITES)
        self._cursor = cursor
        self.names = [column[0] for column in cursor.description]

    def next(self, most: int) -> Sequence[Row]:
        return self._cursor.fetchmany(most)
