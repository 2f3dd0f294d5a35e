"""A part of an export as Parquet; pyarrow is an extra."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nightjar.jobs.batch_records import RawResult

GROUP_ROWS = 10_000
"""Most rows of a row group, which are in memory together."""

GROUP_BYTES = 32 << 20
"""Of the answers of a row group; one that is larger is alone."""

_ERROR_PARTS = ("code", "message", "param")
_REPEATED = ["status_code", "error_code", "error_param"]  # columns that are worth a dictionary


def write_parquet(path: Path, records: Iterable[RawResult]) -> None:
    """Write the rows as one file, with their answers as JSON."""
    text = pa.string()
    schema = pa.schema(
        [
            ("line", pa.int64()),
            ("custom_id", text),
            ("status_code", pa.int32()),
            ("body", text),
            *((f"error_{name}", text) for name in _ERROR_PARTS),
        ]
    )
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=_REPEATED) as writer:
        for some in _groups(records):
            writer.write_batch(pa.record_batch(_columns(some), schema=schema))


def _groups(records: Iterable[RawResult]) -> Iterator[list[RawResult]]:
    """Cut rows into row groups."""
    group: list[RawResult] = []
    room = GROUP_BYTES
    for record in records:
        size = 0 if record.body is None else len(memoryview(record.body))
        if group and (len(group) == GROUP_ROWS or size > room):
            yield group
            group, room = [], GROUP_BYTES
        group.append(record)
        room -= size
    if group:
        yield group


def _columns(rows: list[RawResult]) -> list[list[object]]:
    errors = [row.error for row in rows]
    return [
        [row.line for row in rows],
        [row.custom_id for row in rows],
        [row.status_code for row in rows],
        # They are UTF-8, which pyarrow checks.
        [None if row.body is None else memoryview(row.body) for row in rows],
        *(
            [None if error is None else getattr(error, name) for error in errors]
            for name in _ERROR_PARTS
        ),
    ]
