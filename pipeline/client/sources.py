"""From what a user has to batch lines: typed requests, dictionaries, and the rows of frames."""

import difflib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from nightjar.jobs.lines.parsing import CHAT_URL
from nightjar.jobs.records import JsonObject
from nightjar.pipeline.client.errors import RequestError
from nightjar.pipeline.client.options import SubmitOptions
from nightjar.pipeline.client.requests import (
    COMPLETIONS_URL,
    RERANK_URL,
    Chat,
    Generate,
    Rank,
    Request,
)
from nightjar.pipeline.client.template import Template


@runtime_checkable
class Frame(Protocol):
    """A table that Arrow can read: a frame of pandas, polars or pyarrow, and others."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return a PyCapsule with an ArrowArrayStream."""


Row = Request | Mapping[str, Any]
Rows = Iterable[Row]
Source = str | Path | Frame | Row | Rows
"""A file of batch lines, a frame, one request, or any iterable of requests."""

_URL_OF_FIELD = {
    "prompt": COMPLETIONS_URL,
    "messages": CHAT_URL,
    "query": RERANK_URL,
    "documents": RERANK_URL,
}
_FIELDS = {
    COMPLETIONS_URL: frozenset(Generate.model_fields),
    CHAT_URL: frozenset(Chat.model_fields),
    RERANK_URL: frozenset(Rank.model_fields),
}
_JSON = (str, bool, int, float, list, tuple, dict)


class Lines:
    """Makes a batch line of each row, and numbers the rows.

    Args:
        options: Say how lines are made: `template`, `id_column`, `fields`.
        first: Rows of the same job that were sent before.
    """

    def __init__(self, options: SubmitOptions, first: int = 0) -> None:
        template = options.get("template")
        self._template = None if template is None else Template(template)
        self._id_column = options.get("id_column")
        self._fields = dict(options.get("fields") or {})
        self._index = first

    def of(self, rows: Rows) -> Iterator[bytes]:
        """Yield the line of each row; raises RequestError with the number of a bad one."""
        for row in rows:
            try:
                line = self._encoded(row)
            except RequestError as error:
                raise RequestError(f"row {self._index}: {error}") from error
            yield line
            self._index += 1

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise RequestError unless every row of a frame with these columns becomes a request."""
        wanted = set() if self._template is None else set(self._template.columns)
        if self._id_column is not None:
            wanted.add(self._id_column)
        for name in sorted(wanted - set(columns)):
            raise _no_column(name, columns)
        if self._template is not None:
            return
        known = _FIELDS[_url_of({**self._fields, **dict.fromkeys(columns)})]
        for name in columns:
            if name not in known and name != self._id_column:
                raise RequestError(
                    f"the column {name!r} is not a field of a request{_like(name, known)}; leave "
                    "it out of the frame, or give a template"
                )

    def _encoded(self, row: Row) -> bytes:
        try:
            return msgspec.json.encode(self._line(row)) + b"\n"
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            # Not the error's own words where they may hold a prompt: those of UnicodeError do.
            why = (
                "holds half of a surrogate pair" if isinstance(error, UnicodeError) else str(error)
            )
            raise RequestError(f"cannot be written as JSON: {why}") from None

    def _line(self, row: Row) -> JsonObject:
        if isinstance(row, Request):
            line = {"url": row.url, "body": {**self._fields, **row.body()}}
            return self._complete(line, row.custom_id)
        if not isinstance(row, Mapping):
            raise RequestError(
                f"is of type {type(row).__name__}; give Generate, Chat, Rank, or a dictionary"
            )
        if "url" in row and "body" in row:
            line = dict(row)
            if self._fields and isinstance(line["body"], Mapping):
                line["body"] = {**self._fields, **line["body"]}
            return self._complete(line, line.get("custom_id"))
        return self._line_of_columns(row)

    def _line_of_columns(self, row: Mapping[str, Any]) -> JsonObject:
        given = dict(row)
        custom_id = given.pop("custom_id", None)
        if self._id_column is not None and self._id_column != "custom_id":
            if self._id_column not in given:
                raise _no_column(self._id_column, given)
            custom_id = given.pop(self._id_column)
        if self._template is not None:
            for name in self._template.columns - row.keys():
                raise _no_column(name, row)
            # A row without a value has no prompt: the API rejects it alone, and says so.
            body = {**self._fields, "prompt": self._template.fill(row)}
            url = COMPLETIONS_URL
        else:
            body = {**self._fields, **{k: v for k, v in given.items() if v is not None}}
            url = _url_of({**self._fields, **given})
        body = {name: value for name, value in body.items() if value is not None}
        for name, value in body.items():
            _check_value(name, value)
        return self._complete({"url": url, "body": body}, custom_id)

    def _complete(self, line: JsonObject, custom_id: object) -> JsonObject:
        line["custom_id"] = f"row-{self._index}" if custom_id is None else str(custom_id)
        line.setdefault("method", "POST")
        return line


def one_or_many(source: Row | Rows) -> Rows:
    """Return the rows of a source that is neither a file nor a frame."""
    if isinstance(source, Request | Mapping):
        return [source]
    given: object = source
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise RequestError(
            f"a source of type {type(source).__name__} cannot be submitted; give a path, a frame, "
            "a request, or an iterable of requests"
        )
    return source


def _url_of(row: Mapping[str, Any]) -> str:
    """Return the URL of a row with these fields."""
    named = [name for name in _URL_OF_FIELD if name in row]
    urls = {_URL_OF_FIELD[name] for name in named}
    if len(urls) == 1:
        return urls.pop()
    if urls:
        raise RequestError(f"has {' and '.join(named)}; leave in what is asked")
    raise RequestError(
        "has neither prompt, messages, nor query and documents; name a column so, or give a "
        "template"
    )


def _check_value(name: str, value: object) -> None:
    if not isinstance(value, _JSON):
        kind = type(value).__name__
        raise RequestError(f"{name} is of type {kind}; give a text, a number or a list")
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"{name} is {value}, which JSON lacks; leave it out or give a number")


def _no_column(name: str, columns: Collection[str]) -> RequestError:
    return RequestError(f"there is no column {name!r}{_like(name, columns)}")


def _like(name: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
