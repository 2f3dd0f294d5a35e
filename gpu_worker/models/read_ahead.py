"""Asks the system to read files from disk before their bytes are needed.

So the disk reads the next weights while the processor packs the last ones. A kernel reads ahead by
itself where a file is read in order; a model's tensors stand in the order of their names.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType

from nightjar.checkpoints import ModelDirectory
from nightjar.checkpoints.safetensors_header import LENGTH_BYTES

_AT_ONCE_BYTES = 16 << 20

Range = tuple[Path, int, int]
"""A file, and the offsets of the first byte and the one after the last."""


class ReadAhead:
    """A thread that asks for ranges of files, in the order in which they were given.

    To ask waits for the disk where many requests are under way, so it has a thread of its own. It
    only advises: a file that cannot be opened is left to the reader, who says what is wrong.
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


class TensorsAhead:
    """Has the tensors of a model read ahead by the beginnings of their names.

    Args:
        directory: The model's.
        ahead: Reads them.
    """

    def __init__(self, directory: ModelDirectory, ahead: ReadAhead) -> None:
        self._ahead = ahead
        self._places = {
            name: _place(found.path, found.stored_name, spans)
            for spans in [{h.path: _spans(h.raw) for h in directory.headers}]
            for name, found in directory.tensors.items()
        }

    def expect(self, beginning: str) -> None:
        """Say that all tensors whose names begin so are needed soon."""
        named = (place for name, place in self._places.items() if name.startswith(beginning))
        self._ahead.ask(sorted(named))


def _spans(raw: bytes) -> dict[str, tuple[int, int]]:
    """The offsets in its file of each tensor in a header, which was checked before."""
    data = LENGTH_BYTES + len(raw)
    entries = json.loads(raw)
    entries.pop("__metadata__", None)
    return {
        name: (data + entry["data_offsets"][0], data + entry["data_offsets"][1])
        for name, entry in entries.items()
    }


def _place(path: Path, stored: str, spans: dict[Path, dict[str, tuple[int, int]]]) -> Range:
    begin, end = spans[path][stored]
    return path, begin, end
