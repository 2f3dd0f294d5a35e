"""Asks the system to read files from disk before their bytes are needed, and to write them early.

So the disk reads the next weights while the processor packs the last ones. The operating system
reads ahead by itself where a file is read in order. But a model's tensors stand in another order.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType

_AT_ONCE_BYTES = 16 << 20

Range = tuple[Path, int, int]
"""A file, and the offsets of the first byte and the one after the last."""


class ReadAhead:
    """A thread that asks for ranges of files, in the order in which they were given.

    Asking may have to wait for the disk, so a thread of its own does it. A file that cannot be
    opened is left to the reader, who says what is wrong.
    """

    def __init__(self) -> None:
        self._wanted: SimpleQueue[Range | None] = SimpleQueue()
        self._stopped = False
        self._thread = Thread(target=self._run, name="read-ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped = True
        self._wanted.put(None)
        self._thread.join()

    def ask(self, ranges: list[Range]) -> None:
        """Have these ranges read; return at once."""
        for one in ranges:
            self._wanted.put(one)

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None and not self._stopped:
            with suppress(OSError):
                self._advise(*wanted)

    def _advise(self, path: Path, begin: int, end: int) -> None:
        if sys.platform != "linux":  # no such advice
            return
        with path.open("rb", buffering=0) as file:
            for offset in range(begin, end, _AT_ONCE_BYTES):
                if self._stopped:
                    return
                length = min(_AT_ONCE_BYTES, end - offset)
                os.posix_fadvise(file.fileno(), offset, length, os.POSIX_FADV_WILLNEED)


def write_soon(file: int, begin: int, length: int) -> None:
    """Have the system write these bytes of a file to disk now, without waiting for it.

    Otherwise the disk would idle until the file is synced. file: its descriptor.
    """
    if sys.platform == "linux":  # elsewhere this advice does not begin to write
        os.posix_fadvise(file, begin, length, os.POSIX_FADV_DONTNEED)
