"""The body of a submit: a file of batch lines that can be sent again from its beginning."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from nightjar.pipeline.client.errors import RequestError

PIECE_BYTES = 256 * 1024
_IN_MEMORY_BYTES = 4 * 1024 * 1024
MOST_SPOOLED_BYTES = 1024**3
"""As much as the API takes in one upload, with its default settings."""


class Upload:
    """Bytes that may be read several times, one reading after another."""

    def __init__(self, stream: "BinaryIO | tempfile.SpooledTemporaryFile[bytes]") -> None:
        self._stream = stream
        self.size = stream.seek(0, os.SEEK_END)

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes from the beginning; a file that grows meanwhile is read no further."""
        self._stream.seek(0)
        left = self.size
        while left and (piece := self._stream.read(min(PIECE_BYTES, left))):
            left -= len(piece)
            yield piece


@contextmanager
def file_upload(path: Path) -> Iterator[Upload]:
    """Give the upload of a file; raises RequestError if it cannot be read."""
    with ExitStack() as stack:
        try:
            upload = Upload(stack.enter_context(path.open("rb")))
        except OSError as error:
            # A pipe can be opened, and not read a second time.
            raise RequestError(
                f"{path}: {error.strerror or error}; give the path of a file"
            ) from error
        yield upload


class Spool:
    """A temporary file that lines are written to before they are sent.

    Lines of an iterator can be read once, and an upload that breaks is sent again from its
    beginning. Lines that come slowly would also stall the upload.

    Args:
        most_bytes: More than so many are refused.
    """

    def __init__(self, most_bytes: int = MOST_SPOOLED_BYTES) -> None:
        # Closed by `close`: a spool outlives the function that makes it.
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115
        self._most_bytes = most_bytes
        self._size = 0

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, lines: Iterable[bytes]) -> None:
        """Append lines; raises RequestError where they become too long."""
        for line in lines:
            self._size += len(line)
            if self._size > self._most_bytes:
                raise RequestError(
                    f"the requests are longer than {self._most_bytes} bytes as JSON lines; submit "
                    "them as several jobs"
                )
            self._file.write(line)

    def upload(self) -> Upload:
        """Return what was written as an upload; it ends with the spool."""
        return Upload(self._file)
