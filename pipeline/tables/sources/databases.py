"""What a source needs of a database: connections that read one query and cannot write."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import pyarrow as pa

Row = tuple[Any, ...]

WRITES = "the query writes, and a source only reads; give one SELECT"


class QueryTooLongError(Exception):
    """The query has not ended within its time."""


class LostConnectionError(Exception):
    """The connection ended while rows were read; the message has no secret."""


class ArrowStoppedError(Exception):
    """The rows cannot be read as Arrow from here on; the cursor can."""


class Fetch(Protocol):
    """The rows of a running query."""

    @property
    def names(self) -> list[str]:
        """The names of the columns."""

    @property
    def types(self) -> list[pa.DataType] | None:
        """Their types; None where the rows must tell."""

    def next(self, most: int) -> Sequence[Row]:
        """Return the next rows; none at the end."""


class Database(Protocol):
    """A database that queries are read from."""

    @property
    def place(self) -> str:
        """Where it is, without a password."""

    @property
    def can_lose_connections(self) -> bool:
        """Whether it is reached over a network."""

    def reading(
        self, query: str, timeout_s: int, values: Sequence[Any] = ()
    ) -> AbstractContextManager[Fetch]:
        """Run a query within a time.

        Raises SourceError, LostConnectionError and QueryTooLongError.
        """

    def ordered(self, query: str, key: Sequence[str], after: Row | None) -> tuple[str, list[Any]]:
        """Return the query in the order of its key, from this key on, and its values."""

    def arrow(
        self, query: str, timeout_s: int, schema: pa.Schema
    ) -> AbstractContextManager[Iterator[pa.RecordBatch]] | None:
        """Run a query within a time, and give its rows as batches of this schema.

        None where the driver has no Arrow. Raises ArrowStoppedError, at once or among the rows.
        """


def too_long(timeout_s: int) -> str:
    """Say that a query has not ended in time."""
    return f"the query has not ended after timeout_s = {timeout_s}; raise it, or ask for fewer rows"
