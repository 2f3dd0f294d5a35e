"""Rows of CSV files. Columns are texts, unless the task file gives them another type."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.fs as pafs

from nightjar.pipeline.tables.sources.piece import (
    MOST_BYTES,
    MOST_ROWS,
    Fault,
    Piece,
    SourceError,
)
from nightjar.pipeline.tables.sources.places import Listing, plain
from nightjar.pipeline.tables.sources.values import parse, piece_of

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".csv.zst")
_MOST_CHARACTERS = 4 << 20  # of one value: a quote that is never closed does not fill the memory

_Row = list[str] | Fault


class CsvSource:
    """Reads files one after the other, row by row.

    Args:
        listing: The files; each begins with a line of names, the same in all.
        delimiter: What stands between two values.
        types: Types of columns that are not texts.

    Raises:
        SourceError: The names of the first file cannot be read, or `types` names another column.
    """

    is_fixed = True

    def __init__(self, listing: Listing, delimiter: str, types: Mapping[str, pa.DataType]) -> None:
        self._listing = listing
        self._delimiter = delimiter
        first = listing.files[0]
        with _open(listing, first) as stream:
            names = self._names(first, self._rows(first, stream))
        for name in types:
            if name not in names:
                raise SourceError(
                    f"{listing.name(first)} has no column {name!r}, which `types` names; it has "
                    f"{', '.join(names)}"
                )
        self.schema: pa.Schema = pa.schema([(name, types.get(name, pa.string())) for name in names])

    def batches(self, columns: Sequence[str]) -> Iterator[Piece]:
        """Yield the rows; an empty value is null."""
        for info in self._listing.files:
            with _open(self._listing, info) as stream:
                rows = self._rows(info, stream)
                names = self._names(info, rows)
                if set(names) != set(self.schema.names):
                    raise SourceError(
                        f"{self._listing.name(info)} has other columns than "
                        f"{self._listing.name(self._listing.files[0])}; write both with the same"
                    )
                yield from self._pieces(rows, names, columns)

    def digest(self) -> str:
        """Return a digest of the files' names, sizes and times."""
        return self._listing.digest()

    def count(self) -> int | None:
        """Return None: the rows must be read to be counted."""
        return None

    def _names(self, info: pafs.FileInfo, rows: Iterator[_Row]) -> list[str]:
        """Return the names of the columns, which are the first row."""
        name = self._listing.name(info)
        first = next(rows, None)
        if first is None:
            raise SourceError(f"{name} is empty; its first line must name the columns")
        if isinstance(first, Fault):
            raise SourceError(f"{name}, line 1: {first.reason}")
        repeated = {one for one in first if first.count(one) > 1}
        if repeated or "" in first:
            what = f"the name {min(repeated)!r} twice" if any(repeated) else "a column without name"
            raise SourceError(f"{name}, line 1 has {what}; name each column once")
        return first

    def _rows(self, info: pafs.FileInfo, stream: io.TextIOWrapper) -> Iterator[_Row]:
        """Yield each row that is not blank; what cannot be read is a fault."""
        csv.field_size_limit(_MOST_CHARACTERS)
        reader = csv.reader(stream, delimiter=self._delimiter, strict=True)
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                reason = f"is broken ({error}, line {reader.line_num} of the file); correct it"
                yield Fault(None, reason)
                continue
            except (OSError, EOFError, pa.ArrowException) as error:
                raise SourceError(
                    f"{self._listing.name(info)} is damaged ({plain(error)}); write it again"
                ) from error
            if row is None:
                return
            if row:
                yield row

    def _pieces(
        self, rows: Iterator[_Row], names: Sequence[str], columns: Sequence[str]
    ) -> Iterator[Piece]:
        places = [names.index(name) for name in columns]
        held: list[list[str]] = []
        faults: dict[int, Fault] = {}
        size = 0
        for row in rows:
            fault = row if isinstance(row, Fault) else _fault(row, len(names))
            if fault is not None:
                faults[len(held)] = fault
            values = [] if fault is not None or isinstance(row, Fault) else row
            held.append([values[place] for place in places] if values else [])
            size += sum(map(len, values))
            if len(held) == MOST_ROWS or size > MOST_BYTES:
                yield self._piece(held, faults, columns)
                held, faults, size = [], {}, 0
        if held:
            yield self._piece(held, faults, columns)

    def _piece(
        self, rows: list[list[str]], faults: Mapping[int, Fault], columns: Sequence[str]
    ) -> Piece:
        built = {}
        for place, name in enumerate(columns):
            texts = pa.array([row[place] or None if row else None for row in rows], pa.string())
            built[name] = parse(texts, self.schema.field(name).type)
        return piece_of(built, faults)


def _open(listing: Listing, info: pafs.FileInfo) -> io.TextIOWrapper:
    # What is not UTF-8 becomes half a surrogate pair, so that it costs its own row alone.
    return io.TextIOWrapper(
        listing.open_text(info), encoding="utf-8-sig", errors="surrogateescape", newline=""
    )


def _fault(row: list[str], expected: int) -> Fault | None:
    if len(row) != expected:
        return Fault(None, f"has {len(row)} values for {expected} columns; correct it")
    for text in row:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                return Fault(None, "is not UTF-8; save the file as UTF-8")
    return None
