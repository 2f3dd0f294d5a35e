"""What every source gives: a schema, and its rows in pieces of bounded size."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

MOST_ROWS = 1_000
MOST_BYTES = 8 << 20
"""A piece is cut before it holds more; a single row may be larger."""


class SourceError(Exception):
    """The source cannot be read; the message names it and says how to mend it."""


class SourceLostError(SourceError):
    """The source cannot be read now; another run may succeed."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a row of the source cannot be used; `column` is None if the row as a whole cannot."""

    column: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a source.

    rows: The columns that were asked for, in that order.
    faults: By index in `rows`: rows that the source could not read. Their values are null.
    """

    rows: pa.RecordBatch
    faults: Mapping[int, Fault] = field(default_factory=dict)


class Source(Protocol):
    """Rows of a table, read once from the first to the last."""

    @property
    def schema(self) -> pa.Schema:
        """The columns that can be asked for, with their types."""

    @property
    def is_fixed(self) -> bool:
        """Whether the same digest means the same rows; False for a query of a live database."""

    def batches(self, columns: Sequence[str]) -> Iterator[Piece]:
        """Yield the rows in pieces of at most MOST_ROWS rows.

        Raises:
            SourceError: The source cannot be read, or has changed since it was opened.
        """

    def digest(self) -> str:
        """Return a text that changes when the rows do, as far as the source can tell."""

    def count(self) -> int | None:
        """Return the number of rows where that is known without reading them."""


def cut(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut rows into pieces of bounded size."""
    most = MOST_ROWS
    if rows.nbytes > MOST_BYTES:
        most = max(1, min(most, rows.num_rows * MOST_BYTES // rows.nbytes))
    for start in range(0, rows.num_rows, most):
        yield rows.slice(start, most)
