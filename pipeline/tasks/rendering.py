"""Rendering: the rows of a source become requests; a bad row becomes a rejected one."""

from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa

from nightjar.jobs.lines.parsing import BodyError
from nightjar.jobs.records import JsonObject, NewRequest, RejectedRow
from nightjar.pipeline.tables.keys import BadKeyError, Keys
from nightjar.pipeline.tables.sources.piece import Fault, Piece, Source
from nightjar.pipeline.tasks.checking import check_columns
from nightjar.pipeline.tasks.content import ContentKeys
from nightjar.pipeline.tasks.errors import RowFaultError, TaskError
from nightjar.pipeline.tasks.fields import Task
from nightjar.pipeline.tasks.preparing import Tokens, clean, crop, fill
from nightjar.pipeline.tasks.requests import Requests

Row = dict[str, Any]


class Fitter(Protocol):
    """Shortens a column of a row until its request fits the model's context."""

    @property
    def tokens(self) -> Tokens:
        """The model's tokenizer."""

    def fit(self, requests: Requests, row: Row, body: JsonObject) -> JsonObject:
        """Return a body that fits, or the best that shortening can do; raises like `body`."""


class Renderer:
    """Makes requests of the rows of one source.

    Args:
        task: What is asked for.
        schema: The columns of the source.
        fitter: The model's tokenizer and context; needed where the task crops by tokens.

    Raises:
        TaskError: The task does not fit the columns.
    """

    def __init__(self, task: Task, schema: pa.Schema, fitter: Fitter | None = None) -> None:
        self._task = task
        self._requests = Requests(task)
        self.keys: Keys = check_columns(task, self._requests, schema)
        if fitter is None and any(rule.tokens is not None for rule in task.request.crop):
            raise TaskError("[request] crop: tokens need the model's directory; name it in `model`")
        self._fitter = fitter
        self._fits = any(rule.tokens == "context" for rule in task.request.crop)
        self._content = ContentKeys(task)
        named = [*task.source.key, *self._requests.columns, *self._content.columns]
        self.columns: list[str] = list(dict.fromkeys(named))

    def rows(self, source: Source) -> Iterator[NewRequest | RejectedRow]:
        """Yield one request or one rejected row for each row; `line` counts rows from 1.

        Raises:
            SourceError: The source cannot be read on.
        """
        first = 0
        for piece in source.batches(self.columns):
            yield from self._of_piece(piece, first)
            first += piece.rows.num_rows

    def _of_piece(self, piece: Piece, first: int) -> Iterator[NewRequest | RejectedRow]:
        faults = dict(piece.faults)
        ids, contents = self._ids(piece.rows, faults), self._content.of(piece.rows)
        for offset, row in enumerate(self._prepared(piece.rows)):
            index, custom_id = first + offset, ids[offset]
            if offset in faults:
                yield _rejected(index, custom_id, "invalid_row", faults[offset])
                continue
            try:
                body = self._requests.body(row)
                if self._fits and self._fitter is not None:
                    body = self._fitter.fit(self._requests, row, body)
            except RowFaultError as error:
                fault = Fault(error.column, error.reason)
                yield _rejected(index, custom_id, "invalid_row", fault)
            except BodyError as error:
                column = self._requests.column_of(error.param)
                place = (error.param or "body").removeprefix("body.")
                fault = Fault(column, f"{place}: {error.message}")
                yield _rejected(index, custom_id, error.code, fault, error.param)
            else:
                assert custom_id is not None  # noqa: S101 - a row without key has a fault
                if contents[offset] is not None:
                    body = body | {"content_key": contents[offset]}
                yield NewRequest(index, index + 1, custom_id, self._requests.kind, body)

    def _prepared(self, rows: pa.RecordBatch) -> Iterator[Row]:
        """Yield the values of each row by column, after what the task declares for columns."""
        asked = self._task.request
        tokens = None if self._fitter is None else self._fitter.tokens
        columns = {}
        for name in self._requests.columns:
            values = rows.column(name).to_pylist()
            if name in asked.defaults:
                values = fill(values, asked.defaults[name])
            if name in asked.clean:
                values = clean(values, asked.clean[name])
            for rule in asked.crop:
                if rule.column == name:
                    values = crop(values, rule, tokens)
            columns[name] = values
        if not columns:  # a template without columns: the same request for each row
            yield from ({} for _ in range(rows.num_rows))
            return
        names = list(columns)
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(names, values, strict=True))

    def _ids(self, rows: pa.RecordBatch, faults: dict[int, Fault]) -> list[str | None]:
        """Return the custom_id of each row; a key that cannot be used becomes a fault."""
        if not faults:
            try:
                return [*self.keys.encode(rows)]
            except BadKeyError:
                pass  # find the rows one by one
        return [self._id(rows.slice(index, 1), index, faults) for index in range(rows.num_rows)]

    def _id(self, row: pa.RecordBatch, index: int, faults: dict[int, Fault]) -> str | None:
        try:
            return self.keys.encode(row)[0]
        except BadKeyError as error:
            faults.setdefault(index, Fault(error.column, error.problem))
            return None


def _rejected(
    index: int, custom_id: str | None, code: str, fault: Fault, param: str | None = None
) -> RejectedRow:
    place = f"line {index + 1}" + (f", column {fault.column!r}" if fault.column else "")
    return RejectedRow(index, index + 1, custom_id, code, f"{place}: {fault.reason}", param)
