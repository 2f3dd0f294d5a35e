"""Files of OpenAI batch lines: reading requests, writing results."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from nightjar.jobs.lines.batch_lines import BatchReader, json_lines, line_error
from nightjar.jobs.lines.file_kinds import HEAD_BYTES, other_format
from nightjar.jobs.records import NewRequest, RejectedRow, ResultRecord

_CHUNK_BYTES = 1 << 20


class UnusableInputError(ValueError):
    """The input is not a file of batch lines; the message follows the file's name and says why."""


def check_format(path: Path) -> None:
    """Refuse a file whose first bytes are those of another format.

    Raises:
        UnusableInputError: The file has another format.
        OSError: The file cannot be read.
    """
    with path.open("rb") as stream:
        found = other_format(stream.read(HEAD_BYTES))
    if found is not None:
        raise UnusableInputError(found)


def read_batch_lines(
    stream: BinaryIO, most_bad_in_a_row: int | None = None
) -> Iterator[NewRequest | RejectedRow]:
    """Parse a file line by line, in bounded memory; a bad line becomes a RejectedRow.

    most_bad_in_a_row: after so many bad lines the file is taken for one of another format.

    Raises:
        UnusableInputError: There were so many; the message says what is wrong with the first.
    """
    return stop_at_bad_rows(_rows(stream), most_bad_in_a_row, "lines", "the file")


def stop_at_bad_rows(
    rows: Iterable[NewRequest | RejectedRow], most_in_a_row: int | None, units: str, place: str
) -> Iterator[NewRequest | RejectedRow]:
    """Yield the rows until too many in a row are rejected.

    units, place: what they are called, and where they are corrected.

    Raises:
        UnusableInputError: There were so many; the message says what is wrong with the first.
    """
    bad, first = 0, None
    for row in rows:
        if isinstance(row, NewRequest):
            bad, first = 0, None
        else:
            bad, first = bad + 1, first or row
            if bad == most_in_a_row:
                raise UnusableInputError(
                    f"has {bad} {units} in a row that cannot be used; the first: {first.message}; "
                    f"correct {place}, or raise NIGHTJAR_BAD_LINES_IN_A_ROW to read on"
                )
        yield row


def _rows(stream: BinaryIO) -> Iterator[NewRequest | RejectedRow]:
    reader = BatchReader()
    while chunk := stream.read(_CHUNK_BYTES):
        yield from reader.rows(chunk)
    yield from reader.last_rows()


def failure_text(line: Mapping[str, Any]) -> str:
    """Return which line failed and why, from the output line of a failure."""
    error = line_error(line) or {}
    message = str(error.get("message"))
    place = f"line {error['line']}" if "line" in error else ""
    return message if message.startswith(place) else f"{place}: {message}"


@contextmanager
def replaced_when_whole(path: Path) -> Iterator[BinaryIO]:
    """Write a file beside `path`; when it is complete and on the disk, move it to `path`."""
    path = path.resolve()  # a link stays a link: its target is replaced
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.chmod(0o666 & ~_umask())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_results(path: Path, records: Iterable[ResultRecord]) -> int:
    """Write results as OpenAI batch output lines; return how many."""
    count = 0
    with replaced_when_whole(path) as stream:
        for line in json_lines(records):
            stream.write(line)
            count += 1
    return count


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
