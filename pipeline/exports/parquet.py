"""A part of an export as Parquet; pyarrow is an extra."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nightjar.jobs.batch_records import RawResult

GROUP_ROWS = 10_000
"""Rows of a row group, which are in memory together."""


def write_parquet(path: Path, records: Iterable[RawResult]) -> None:
    """Write the rows as one file, with their answers as JSON."""
    text = pa.string()
    schema = pa.schema(
        [
            ("line", pa.int64()),
            ("custom_id", text),
            ("status_code", pa.int32()),
            ("body", text),
            *((f"error_{name}", text) for name in ("code", "message", "param")),
        ]
    )
    rows = iter(records)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while some := list(islice(rows, GROUP_ROWS)):
            columns = zip(*map(_cells, some), strict=True)
            writer.write_batch(pa.record_batch(list(map(list, columns)), schema=schema))


def _cells(record: RawResult) -> tuple[object, ...]:
    error = record.error
    body = None if record.body is None else bytes(record.body).decode()
    told = (None, None, None) if error is None else (error.code, error.message, error.param)
    return record.line, record.custom_id, record.status_code, body, *told
