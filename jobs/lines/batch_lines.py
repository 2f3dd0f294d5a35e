"""OpenAI batch lines: cutting a stream of bytes into lines, and writing lines of output."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from nightjar.jobs.batch_records import RawResult
from nightjar.jobs.lines.error_shape import error_payload
from nightjar.jobs.lines.line_shapes import OutputLine
from nightjar.jobs.lines.parsing import (
    CHAT_URL,
    MAX_LINE_BYTES,
    MAX_REASON,
    UTF8_MARK,
    parse_batch_line,
)
from nightjar.jobs.records import JsonObject, NewRequest, RejectedRow, ResultRecord
from nightjar.jobs.states import RequestKind, StopReason

PIECE_BYTES = 64 * 1024
LINE_URLS = {
    (RequestKind.GENERATE, False): "/v1/completions",
    (RequestKind.GENERATE, True): CHAT_URL,
    (RequestKind.RANK, False): "/v1/rerank",
}
"""The URL of a line by the request's kind, and whether it has messages."""


class LineCutter:
    """Cuts chunks of bytes into lines, and keeps no more than one line in memory.

    A line that is too long is cut off after `max_bytes + 1` bytes, so that
    `parse_batch_line` sees that it is too long.
    """

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()  # the line that has begun
        self._line = 0

    def cut(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        """(line number from 1, line) of each line that this chunk completes; no blank ones."""
        *complete, last = chunk.split(b"\n")
        for piece in complete:
            yield from self._take(piece)
        self._keep(last)

    def end(self) -> Iterator[tuple[int, bytes]]:
        """The last line, if it lacks a newline."""
        yield from self._take(b"")

    def _keep(self, piece: bytes) -> None:
        room = self._max_bytes + 1 - len(self._rest)
        self._rest += piece[: max(room, 0)]

    def _take(self, line: bytes) -> Iterator[tuple[int, bytes]]:
        """The line that ends with this piece; most of them are the whole line."""
        self._line += 1
        if self._rest or len(line) > self._max_bytes:
            self._keep(line)
            line = bytes(self._rest)
            self._rest.clear()
        text = line.removeprefix(UTF8_MARK) if self._line == 1 else line
        if text.strip():
            yield self._line, line.rstrip(b"\r")


class BatchReader:
    """From chunks of an upload to rows, numbered through the whole upload.

    Args:
        max_line_bytes: A longer line is rejected.
        only_url: A line with another URL is rejected, if this is given.
        first: Rows and lines of the same job that came in other uploads before.
    """

    def __init__(
        self,
        max_line_bytes: int = MAX_LINE_BYTES,
        only_url: str | None = None,
        first: int = 0,
    ) -> None:
        self._cutter = LineCutter(max_line_bytes)
        self._max_line_bytes = max_line_bytes
        self._only_url = only_url
        self._first = self._index = first

    def rows(self, chunk: bytes) -> list[NewRequest | RejectedRow]:
        """The rows that this chunk completes."""
        return self._parse(self._cutter.cut(chunk))

    def last_rows(self) -> list[NewRequest | RejectedRow]:
        """The row of a last line without newline, if there is one."""
        return self._parse(self._cutter.end())

    def _parse(self, lines: Iterable[tuple[int, bytes]]) -> list[NewRequest | RejectedRow]:
        rows = []
        for line, raw in lines:
            row = parse_batch_line(
                raw,
                self._first + line,
                self._index,
                max_bytes=self._max_line_bytes,
                only_url=self._only_url,
            )
            rows.append(row)
            self._index += 1
        return rows


def rejected_line(row: RejectedRow) -> bytes:
    """The batch line of a row that cannot become a request: it says why."""
    message = row.message.replace("\x00", "")[:MAX_REASON]
    error = {"code": row.code, "message": message, "param": row.param}
    return msgspec.json.encode({"custom_id": row.custom_id, "error": error}) + b"\n"


# The codes of rows that were not computed, as OpenAI's error files have them.
_NOT_COMPUTED = {
    StopReason.CANCELLED.value: "batch_cancelled",
    StopReason.EXPIRED.value: "batch_expired",
}


def output_line(record: ResultRecord | RawResult) -> OutputLine:
    """The OpenAI batch line of an outcome.

    A failed request has its error in `response.body.error`, with the `line` of the file. Only a row
    that was not computed has `error`: its job was cancelled or has expired.
    """
    line: OutputLine = {
        "id": f"batch_req_{record.id:012x}",
        "custom_id": record.custom_id,
        "response": None,
        "error": None,
    }
    error = record.error
    body: Any = record.body
    if error is not None and error.code in _NOT_COMPUTED:
        line["error"] = {"code": _NOT_COMPUTED[error.code], "message": error.message}
        return line
    if error is not None:
        failure = error_payload(record.status_code, error.code, error.message, error.param)
        failure["error"]["line"] = record.line
        body = failure
    line["response"] = {
        "status_code": record.status_code,
        "request_id": f"req_{record.id:012x}",
        "body": body,
    }
    return line


def line_error(line: Mapping[str, Any]) -> JsonObject | None:
    """The error of an output line, wherever it stands; None for a success.

    Lines of the version before had every error in `error`.
    """
    if line["error"] is not None:
        found: JsonObject = line["error"]
        return found
    response = line["response"]
    failure: JsonObject | None = response["body"].get("error")
    return failure if response["status_code"] >= 400 else None


def json_line(record: ResultRecord | RawResult) -> bytes:
    """The output line of an outcome as UTF-8; a raw body stands in it as it is."""
    line = output_line(record)
    try:
        return msgspec.json.encode(line) + b"\n"
    except OverflowError:  # msgspec takes integers of 64 bits only
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def json_lines(records: Iterable[ResultRecord | RawResult]) -> Iterator[bytes]:
    """Output lines as UTF-8, one at a time."""
    return map(json_line, records)


def json_pieces(records: Iterable[ResultRecord | RawResult]) -> Iterator[bytes]:
    """The same lines, as many at a time as are worth a trip to a thread and a write."""
    piece = bytearray()
    for line in json_lines(records):
        piece += line
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)
