"""Rows of a query: read in bounded fetches, in a transaction that cannot write."""

import decimal
import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from nightjar.pipeline.tables.sources.databases import (
    ArrowStoppedError,
    Database,
    Fetch,
    LostConnectionError,
    QueryTooLongError,
    too_long,
)
from nightjar.pipeline.tables.sources.piece import (
    MOST_BYTES,
    MOST_ROWS,
    Piece,
    SourceError,
    SourceLostError,
    cut,
)
from nightjar.pipeline.tables.sources.values import INFERRED_FROM, build, infer_type, piece_of

_FIRST_FETCH = 100
_RETRIES_S = (0.5, 2.0, 8.0, 30.0)
"""Waits before the connection is made again; the count begins anew when rows have come."""


@dataclass(frozen=True, slots=True)
class Query:
    """What is read.

    key: The columns that tell the rows apart.
    resume: Read in the order of the key, so that reading can go on behind a row.
    """

    text: str
    key: Sequence[str]
    timeout_s: int
    resume: bool


@dataclass(slots=True)
class _Place:
    """How far a query was read: the last key, and how many rows had it."""

    key: tuple[Any, ...] | None = None
    same: int = 0
    rows: int = 0

    def pass_rows(self, keys: Sequence[tuple[Any, ...]]) -> None:
        for key in keys:
            self.same = self.same + 1 if key == self.key else 1
            self.key = key
        self.rows += len(keys)

    def pass_batch(self, keys: pa.RecordBatch) -> None:
        """Pass rows whose keys are columns, which come in the order of the keys."""
        if not keys.num_rows:
            return
        last, same = _row(keys, keys.num_rows - 1), 1
        while same < keys.num_rows and _row(keys, keys.num_rows - 1 - same) == last:
            same += 1
        is_one_key = same == keys.num_rows and last == self.key
        self.key, self.same = last, same + (self.same if is_one_key else 0)
        self.rows += keys.num_rows


class SqlSource:
    """Reads the rows of one query.

    Raises:
        SourceError: The database cannot be reached, or refuses the query.
    """

    is_fixed = False

    def __init__(self, database: Database, query: Query) -> None:
        self._database = database
        self._query = query
        try:
            self.schema: pa.Schema = self._read_schema()
        except LostConnectionError as error:
            raise SourceLostError(f"the database cannot be reached: {error}") from error
        except QueryTooLongError:
            raise self._too_long() from None

    def batches(self, columns: Sequence[str]) -> Iterator[Piece]:
        """Yield the rows; after a lost connection, go on behind the last key."""
        deadline = time.monotonic() + self._query.timeout_s
        place, lost_in_a_row = _Place(), 0
        if (yield from self._arrow_pieces(place, deadline, columns)):
            return
        while True:
            before = place.rows
            try:
                for rows in self._rows(place, deadline):
                    yield from self._pieces(rows, columns)
            except LostConnectionError as error:
                lost_in_a_row = 1 if place.rows > before else lost_in_a_row + 1
                self._check_can_resume(place, lost_in_a_row, error)
                time.sleep(_RETRIES_S[lost_in_a_row - 1])
            except QueryTooLongError:
                raise self._too_long() from None
            else:
                return

    def digest(self) -> str:
        """Return a digest of the database's place and the query, not of the rows."""
        told = "\0".join([self._database.place, self._query.text, *self._query.key])
        return hashlib.sha256(told.encode()).hexdigest()

    def count(self) -> int | None:
        """Return None: counting would run the query."""
        return None

    def _too_long(self) -> SourceError:
        # The time of the task file, of which a query that goes on has a part.
        return SourceError(too_long(self._query.timeout_s))

    def _check_can_resume(self, place: _Place, lost: int, error: Exception) -> None:
        told = f"the connection to the database was lost after {place.rows} rows ({error})"
        if not self._is_ordered:
            raise SourceLostError(
                f"{told}, and `resume = false` reads in no order, so that reading cannot go on; "
                "run again"
            ) from error
        if lost > len(_RETRIES_S):
            raise SourceLostError(f"{told}, and could not be made again; run again") from error

    @property
    def _is_ordered(self) -> bool:
        return self._query.resume and self._database.can_lose_connections

    def _read_schema(self) -> pa.Schema:
        """Return the types of the columns: as the database tells them, or as the first rows do."""
        with self._database.reading(self._query.text, self._query.timeout_s) as fetch:
            names = fetch.names
            repeated = {name for name in names if names.count(name) > 1}
            if repeated:
                raise SourceError(
                    f"the query gives two columns {min(repeated)!r}; name them apart with AS"
                )
            if fetch.types is not None:
                return pa.schema(list(zip(names, fetch.types, strict=True)))
            rows = fetch.next(_FIRST_FETCH)
            if _size(rows) < MOST_BYTES:
                rows = [*rows, *fetch.next(INFERRED_FROM - _FIRST_FETCH)]
        columns = list(zip(*rows, strict=True)) if rows else [() for _ in names]
        return pa.schema(
            [(name, infer_type(one)) for name, one in zip(names, columns, strict=True)]
        )

    def _arrow_pieces(
        self, place: _Place, deadline: float, columns: Sequence[str]
    ) -> Generator[Piece, None, bool]:
        """Yield the rows as the driver's Arrow; return whether these were all."""
        if not self._is_ordered:  # the cursor could not go on
            return False
        text, _ = self._database.ordered(self._query.text, self._query.key, None)
        reading = self._database.arrow(text, self._query.timeout_s, self.schema)
        if reading is None:
            return False
        key = [name for name in self._query.key if name in self.schema.names]
        try:
            with reading as batches:
                for batch in batches:
                    if time.monotonic() > deadline:
                        raise self._too_long()
                    yield from map(Piece, cut(batch.select(columns)))
                    place.pass_batch(batch.select(key))
        except ArrowStoppedError:
            return False
        return True

    def _rows(self, place: _Place, deadline: float) -> Iterator[Sequence[tuple[Any, ...]]]:
        """Yield rows behind the place, and move the place."""
        text, values = self._query.text, list[Any]()
        if self._is_ordered:
            text, values = self._database.ordered(text, self._query.key, place.key)
        skipped = place.same
        left = max(1, int(deadline - time.monotonic()))
        with self._database.reading(text, left, values) as fetch:
            if fetch.names != self.schema.names:
                raise SourceError("the query gives other columns than at first; run again")
            keys = [fetch.names.index(name) for name in self._query.key if name in fetch.names]
            for rows in _bounded(fetch):
                if time.monotonic() > deadline:
                    raise self._too_long()
                found = [tuple(row[index] for index in keys) for row in rows]
                start = 0
                while start < len(rows) and skipped and found[start] == place.key:
                    start, skipped = start + 1, skipped - 1
                if start < len(rows):
                    skipped = 0
                yield rows[start:]
                place.pass_rows(found[start:])

    def _pieces(self, rows: Sequence[tuple[Any, ...]], columns: Sequence[str]) -> Iterator[Piece]:
        if not rows:
            return
        by_name = dict(zip(self.schema.names, zip(*rows, strict=True), strict=True))
        built = {}
        for name in columns:
            wanted = self.schema.field(name).type
            built[name] = build(_plain(by_name[name], wanted), wanted)
        piece = piece_of(built, {})
        if piece.faults or piece.rows.nbytes <= MOST_BYTES:
            yield piece
        else:
            yield from map(Piece, cut(piece.rows))


def _row(batch: pa.RecordBatch, index: int) -> tuple[Any, ...]:
    return tuple(column[index].as_py() for column in batch.columns)


def _bounded(fetch: Fetch) -> Iterator[Sequence[tuple[Any, ...]]]:
    """Fetch until the end, as many rows at a time as are about MOST_BYTES."""
    most = _FIRST_FETCH
    while rows := fetch.next(most):
        yield rows
        most = max(1, min(MOST_ROWS, MOST_BYTES * len(rows) // max(_size(rows), 1)))


def _size(rows: Sequence[tuple[Any, ...]]) -> int:
    """Return about how many bytes the rows' texts have."""
    return sum(len(value) for row in rows for value in row if isinstance(value, (str, bytes, list)))


def _plain(values: Sequence[Any], wanted: pa.DataType) -> Sequence[Any]:
    """Write what Arrow has no type for as text: exact numbers, JSON, UUIDs."""
    if wanted != pa.string() or {type(value) for value in values} <= {str, type(None)}:
        return values
    return [_as_text(value) for value in values]


_AS_TEXT: Mapping[type, Callable[[Any], str]] = {
    dict: lambda value: json.dumps(value, ensure_ascii=False),
    list: lambda value: json.dumps(value, ensure_ascii=False),
    decimal.Decimal: lambda value: format(value, "f"),
}


def _as_text(value: Any) -> Any:  # noqa: ANN401 - whatever the driver gives
    if value is None or isinstance(value, (str, bytes, bool)):
        return value
    return _AS_TEXT.get(type(value), str)(value)
