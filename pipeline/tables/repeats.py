"""Finds a key that two rows of a table have, in memory that does not grow with the table."""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import IO, Self

import numpy as np

BUCKETS = 64
MEMORY_BYTES = 32 << 20  # beyond it, the buckets are on the disk
_ENTRY = np.dtype([("digest", "S16"), ("row", "<i8")])


@dataclass(frozen=True, slots=True)
class Repeat:
    """Two rows with one key; counted from 0, in the order in which they were added."""

    first: int
    second: int


class Repeats:
    """Collects the keys of all rows as digests of 16 bytes, then looks for equal ones.

    Use it as a context manager: it holds temporary files.
    """

    def __init__(self) -> None:
        self._buckets: list[IO[bytes]] = [
            tempfile.SpooledTemporaryFile(MEMORY_BYTES // BUCKETS)  # noqa: SIM115 - closed below
            for _ in range(BUCKETS)
        ]
        self._rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for bucket in self._buckets:
            bucket.close()

    def add(self, custom_ids: Iterable[str]) -> None:
        """Add the keys of the next rows."""
        for custom_id in custom_ids:
            # NumPy cuts NUL bytes at the end of a text off; no digest ends with one then.
            digest = blake2b(custom_id.encode(), digest_size=15).digest() + b"\x01"
            row = self._rows.to_bytes(8, "little")
            self._buckets[digest[0] % BUCKETS].write(digest + row)
            self._rows += 1

    def first(self) -> Repeat | None:
        """The first row whose key an earlier row has, and that row; None if every key is new."""
        found = [repeat for bucket in self._buckets if (repeat := _first_of(bucket)) is not None]
        return min(found, key=lambda one: one.second, default=None)


def _first_of(bucket: IO[bytes]) -> Repeat | None:
    bucket.seek(0)
    entries = np.frombuffer(bucket.read(), _ENTRY)
    entries = entries[np.argsort(entries["digest"], kind="stable")]
    again = np.flatnonzero(entries["digest"][1:] == entries["digest"][:-1])
    if not len(again):
        return None
    rows = entries["row"]
    place = again[np.argmin(rows[again + 1])]
    first = place
    while first and entries["digest"][first - 1] == entries["digest"][place]:
        first -= 1
    return Repeat(int(rows[first]), int(rows[place + 1]))
