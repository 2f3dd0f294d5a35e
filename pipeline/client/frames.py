"""Tables in and out, through Arrow: neither pandas, polars nor pyarrow is loaded before its use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nightjar.pipeline.client.errors import ClientError
from nightjar.pipeline.client.records import Result

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

    from nightjar.pipeline.client.sources import Frame

_ROWS_AT_ONCE = 1_000


class FrameReader:
    """Reads a frame as dictionaries, some rows at a time."""

    def __init__(self, frame: Frame) -> None:
        self._batches: Any = _module("pyarrow").RecordBatchReader.from_stream(frame)
        self.columns: list[str] = self._batches.schema.names

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each row; a null is None."""
        for batch in self._batches:
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield from batch.slice(start, _ROWS_AT_ONCE).to_pylist()


class ResultTable:
    """Collects results as columns, and gives them as a table."""

    def __init__(self) -> None:
        pa = self._pa = _module("pyarrow")
        self._schema = pa.schema(
            [
                ("custom_id", pa.string()),
                ("text", pa.string()),
                ("finish_reason", pa.string()),
                ("scores", pa.list_(pa.float64())),
                ("ranking", pa.list_(pa.int32())),
                ("prompt_tokens", pa.int64()),
                ("completion_tokens", pa.int64()),
                ("error_code", pa.string()),
                ("error_message", pa.string()),
            ]
        )
        self._batches: list[Any] = []

    def add(self, results: Iterable[Result]) -> None:
        """Append a page of results."""
        rows = [_columns(result) for result in results]
        self._batches.append(self._pa.RecordBatch.from_pylist(rows, schema=self._schema))

    def arrow(self) -> pa.Table:
        """Return all of them as an Arrow table."""
        return self._pa.Table.from_batches(self._batches, schema=self._schema)

    def pandas(self) -> pd.DataFrame:
        """Return all of them as a pandas frame."""
        _module("pandas")
        return self.arrow().to_pandas()

    def polars(self) -> pl.DataFrame:
        """Return all of them as a polars frame."""
        found: pl.DataFrame = _module("polars").from_arrow(self.arrow())
        return found


def _columns(result: Result) -> dict[str, Any]:
    usage, error = result.usage, result.error
    return {
        "custom_id": result.custom_id,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "scores": result.scores,
        "ranking": result.ranking,
        "prompt_tokens": None if usage is None else usage.prompt_tokens,
        "completion_tokens": None if usage is None else usage.completion_tokens,
        "error_code": None if error is None else error.code,
        "error_message": None if error is None else error.message,
    }


def _module(package: str) -> Any:  # noqa: ANN401 - a module
    """Return an optional package; raises ClientError where it is missing."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ClientError(
            f"frames need {package}: pip install 'nightjar-batch[tables]' {package}"
        ) from error
