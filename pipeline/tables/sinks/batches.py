"""Results as Arrow batches of bounded size: keys, answers and errors as columns."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from nightjar.jobs.records import ResultRecord
from nightjar.pipeline.tables.keys import Keys
from nightjar.pipeline.tables.sinks.columns import (
    ERRORS,
    Answers,
    answer_columns,
    errors_schema,
    table_schema,
)
from nightjar.pipeline.tables.sinks.sink import SinkWriteError

MOST_ROWS = 4_096
MOST_BYTES = 8 << 20  # of a batch, about: one row may be larger
_ROW_BYTES = 128
_REPEATED = "duplicate_custom_id"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some results, as rows of the table and of the table of errors."""

    table: pa.RecordBatch
    errors: pa.RecordBatch | None  # None where failed rows are in the table
    last_index: int  # the row index of the last result
    succeeded: int
    failed: int
    left_out: int


@dataclass(slots=True)
class _Pending:
    ids: list[str] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    failed_ids: list[str] = field(default_factory=list)
    failed_rows: list[tuple[Any, ...]] = field(default_factory=list)
    bytes: int = 0
    succeeded: int = 0
    failed: int = 0
    left_out: int = 0

    @property
    def is_full(self) -> bool:
        count = self.succeeded + self.failed + self.left_out
        return count >= MOST_ROWS or self.bytes >= MOST_BYTES


class ResultBatches:
    """Builds the batches of one sink.

    Args:
        keys: The key columns.
        answers: The kind of the task.
        with_errors: Whether failed rows are in the table.

    Raises:
        ValueError: A key column has the name of a column of results.
    """

    def __init__(self, keys: Keys, answers: Answers, *, with_errors: bool) -> None:
        self.schema: pa.Schema = table_schema(keys, answers, with_errors=with_errors)
        self.errors_schema: pa.Schema = errors_schema(keys)
        self._keys = keys
        self._with_errors = with_errors
        self._values = answer_columns(answers).values
        self._no_answer = (None,) * len(answer_columns(answers).fields)
        self._no_error = (None,) * len(ERRORS) if with_errors else ()

    def pieces(self, results: Iterable[ResultRecord]) -> Iterator[Piece]:
        """The results in their order.

        A failure without a key of its own is counted and left out: its line had no `custom_id`, or
        the one of an earlier row.
        """
        pending, last = _Pending(), -1
        for record in results:
            self._add(pending, record)
            last = record.index
            if pending.is_full:
                yield self._piece(pending, last)
                pending = _Pending()
        if pending.succeeded + pending.failed + pending.left_out:
            yield self._piece(pending, last)

    def _add(self, pending: _Pending, record: ResultRecord) -> None:
        error, body, id_ = record.error, record.body, record.custom_id
        if error is None and body is not None and id_ is not None:
            values = self._values(record, body)
            pending.ids.append(id_)
            pending.rows.append(values + self._no_error)
            pending.succeeded += 1
            pending.bytes += _ROW_BYTES + _size(values[0])
            return
        if error is None or id_ is None or error.code == _REPEATED:
            pending.left_out += 1
            return
        told = error.code, error.message, error.param
        pending.bytes += _ROW_BYTES + len(error.message)
        pending.failed += 1
        if self._with_errors:
            pending.ids.append(id_)
            pending.rows.append(self._no_answer + told)
        else:
            pending.failed_ids.append(id_)
            pending.failed_rows.append(told)

    def _piece(self, pending: _Pending, last: int) -> Piece:
        errors = None
        if not self._with_errors:
            errors = self._batch(self.errors_schema, pending.failed_ids, pending.failed_rows)
        table = self._batch(self.schema, pending.ids, pending.rows)
        counts = pending.succeeded, pending.failed, pending.left_out
        return Piece(table, errors, last, *counts)

    def _batch(
        self, schema: pa.Schema, ids: list[str], rows: list[tuple[Any, ...]]
    ) -> pa.RecordBatch:
        try:
            keys = self._keys.decode(ids)
        except ValueError as error:
            raise SinkWriteError(f"the results belong to another table: {error}") from error
        fields = [schema.field(place) for place in range(len(keys), len(schema))]
        columns = zip(*rows, strict=True) if rows else iter([()] * len(fields))
        made = [_array(column, one.type) for column, one in zip(columns, fields, strict=True)]
        return pa.record_batch([*keys, *made], schema=schema)


def _size(value: object) -> int:
    """About the bytes of a row's largest value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(8 if one is None or isinstance(one, float) else len(one) for one in value)
    return 8


def _array(values: tuple[Any, ...], type_: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, type_)
    except UnicodeEncodeError:  # a lone surrogate, which JSON can hold and UTF-8 cannot
        return pa.array([_storable(value) for value in values], type_)


def _storable(value: Any) -> Any:  # noqa: ANN401 - a text, a list of texts or None
    if isinstance(value, list):
        return [_storable(one) for one in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) else value
