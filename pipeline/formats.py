"""Files of OpenAI batch lines: reading requests, writing results."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from nightjar.jobs.batch_lines import BatchReader, json_lines
from nightjar.jobs.records import NewRequest, RejectedRow, ResultRecord

_CHUNK_BYTES = 1 << 20


def read_batch_lines(stream: BinaryIO) -> Iterator[NewRequest | RejectedRow]:
    """Parse a file line by line, in bounded memory; a bad line becomes a RejectedRow."""
    reader = BatchReader()
    while chunk := stream.read(_CHUNK_BYTES):
        yield from reader.rows(chunk)
    yield from reader.last_rows()


@contextmanager
def replaced_when_whole(path: Path) -> Iterator[BinaryIO]:
    """Write a file beside `path` and move it there when it is complete and on the disk."""
    path = path.resolve()  # a link stays one: what it points to is replaced
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
