"""One part of an export: its rows are read page by page and written as one file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import msgspec

from nightjar.jobs.batch_records import RawResult
from nightjar.jobs.lines.batch_lines import json_pieces
from nightjar.jobs.store import Store
from nightjar.pipeline.exports.plan import Part, Plan, Written
from nightjar.pipeline.exports.target import Target

PAGE_ROWS = 1_000
"""Rows that are read at once, up to 4 MiB of them."""


class IncompleteError(Exception):
    """Rows are missing: the job is retried, or purged."""


def write_part(store: Store, target: Target, plan: Plan, part: Part) -> Written:
    """Write a part, then the note that it is whole; what is whole already is left.

    Raises:
        IncompleteError: The job has other results than when the export began.
        PurgedJobError: It was purged meanwhile.
        OSError: The target cannot be written.
    """
    if (note := target.read(part.note)) is not None:
        noted = msgspec.json.decode(note, type=Written)
        if target.size(part.name) == noted.bytes:
            return noted
    with target.made(part.name) as path:
        found = store.results.iterate_raw(
            plan.job.id, after=part.after, last=part.last, page_size=PAGE_ROWS
        )
        records = _Counted(found)
        if plan.format == "parquet":
            from nightjar.pipeline.exports.parquet import write_parquet  # noqa: PLC0415 - pyarrow

            write_parquet(path, records)
        else:
            with path.open("wb") as stream:
                stream.writelines(json_pieces(records))
        if records.count != part.last - part.after:
            raise IncompleteError(
                f"{records.count} of rows {part.after + 1} to {part.last} have results: the job "
                "was changed meanwhile; export it again when it is over"
            )
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        written = Written(part.name, records.count, path.stat().st_size, digest)
    with target.made(part.note) as path:
        path.write_bytes(msgspec.json.encode(written))
    return written


class _Counted:
    def __init__(self, records: Iterable[RawResult]) -> None:
        self._records = records
        self.count = 0

    def __iter__(self) -> Iterator[RawResult]:
        for record in self._records:
            self.count += 1
            yield record
