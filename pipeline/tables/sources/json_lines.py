"""Rows of JSON lines: one object a line, whose names are the columns."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs

from nightjar.jobs.lines.batch_lines import LineCutter
from nightjar.jobs.lines.parsing import MAX_LINE_BYTES, UTF8_MARK
from nightjar.pipeline.tables.sources.piece import (
    MOST_BYTES,
    MOST_ROWS,
    Fault,
    Piece,
    SourceError,
)
from nightjar.pipeline.tables.sources.places import Listing, plain
from nightjar.pipeline.tables.sources.values import INFERRED_FROM, build, infer_schema, piece_of

SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst")
_CHUNK_BYTES = 1 << 20

_Row = dict[str, Any] | Fault


class JsonLinesSource:
    """Reads files one after the other, line by line.

    The first rows say which columns there are, and their types. A value of another type costs its
    own row alone.

    Raises:
        SourceError: The first file cannot be read, or none of its first lines is an object.
    """

    is_fixed = True

    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        found = self._first_rows()
        rows = [row for row in found if not isinstance(row, Fault)]
        if not rows:
            told = found[0].reason if found and isinstance(found[0], Fault) else "is empty"
            raise SourceError(
                f"{listing.name(listing.files[0])} has no line that can be used: the first {told}"
            )
        self.schema: pa.Schema = infer_schema(rows)

    def batches(self, columns: Sequence[str]) -> Iterator[Piece]:
        """Yield the rows; a name that a line lacks is null."""
        held: list[Mapping[str, Any]] = []
        faults: dict[int, Fault] = {}
        size = 0
        for row, length in self._all_rows():
            if isinstance(row, Fault):
                faults[len(held)] = row
            held.append({} if isinstance(row, Fault) else row)
            size += length
            if len(held) == MOST_ROWS or size > MOST_BYTES:
                yield self._piece(held, faults, columns)
                held, faults, size = [], {}, 0
        if held:
            yield self._piece(held, faults, columns)

    def digest(self) -> str:
        """Return a digest of the files' names, sizes and times."""
        return self._listing.digest()

    def count(self) -> int | None:
        """Return None: the rows must be read to be counted."""
        return None

    def _first_rows(self) -> list[_Row]:
        """Return the rows that say which columns there are, of bounded size together."""
        found, size = [], 0
        for row, length in islice(self._all_rows(), INFERRED_FROM):
            found.append(row)
            size += length
            if size > MOST_BYTES:
                break
        return found

    def _piece(
        self,
        rows: Sequence[Mapping[str, Any]],
        faults: Mapping[int, Fault],
        columns: Sequence[str],
    ) -> Piece:
        types = {name: self.schema.field(name).type for name in columns}
        built = {name: build([row.get(name) for row in rows], types[name]) for name in columns}
        return piece_of(built, faults)

    def _all_rows(self) -> Iterator[tuple[_Row, int]]:
        """Yield a row or a fault for each line that is not blank, with its bytes; a fault has 0."""
        for info in self._listing.files:
            cutter = LineCutter()
            with self._listing.open_text(info) as stream:
                for chunk in self._chunks(info, stream):
                    yield from map(_decoded, cutter.cut(chunk))
            yield from map(_decoded, cutter.end())

    def _chunks(self, info: pafs.FileInfo, stream: pa.NativeFile) -> Iterator[bytes]:
        try:
            first = stream.read(_CHUNK_BYTES).removeprefix(UTF8_MARK)
            yield from chain([first], iter(lambda: stream.read(_CHUNK_BYTES), b""))
        except (OSError, EOFError, pa.ArrowException) as error:
            raise SourceError(
                f"{self._listing.name(info)} is damaged ({plain(error)}); write it again"
            ) from error


def _decoded(numbered: tuple[int, bytes]) -> tuple[_Row, int]:
    line, raw = numbered
    if len(raw) > MAX_LINE_BYTES:
        return Fault(None, f"is longer than {MAX_LINE_BYTES} bytes (line {line}); split it"), 0
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return Fault(None, f"is broken JSON ({error}, line {line} of the file); correct it"), 0
    if not isinstance(found, dict):
        return Fault(None, f"is not a JSON object (line {line} of the file); write {{...}}"), 0
    return found, len(raw)
