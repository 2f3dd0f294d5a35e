"""The rows of an open job on their way to the API: gathered into parts of bounded size."""

import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nightjar.pipeline.client.errors import RequestError
from nightjar.pipeline.client.options import SubmitOptions
from nightjar.pipeline.client.sources import Lines, Rows
from nightjar.pipeline.client.uploads import Upload

PART_ROWS = 1_000
PART_BYTES = 1 << 20
MOST_LINE_BYTES = 8 << 20
"""A longer line would not fit into a part, whose limit is the API's."""
OLDEST_S = 1.0
"""Rows that have waited for so long go with the next row."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that are appended together.

    first: Rows of the job before them.
    """

    first: int
    rows: int
    content: bytes

    def upload(self) -> Upload:
        """Return the body of the call."""
        return Upload(io.BytesIO(self.content))


class Parts:
    """Gathers the rows of one open job.

    Args:
        options: Say how rows become lines.
        first: Rows that the job has already.
        clock: Monotonic seconds.

    Attributes:
        sent: Rows of the job that the API has.
    """

    def __init__(
        self, options: SubmitOptions, first: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lines = Lines(options, first)
        self._clock = clock
        self._pending: list[bytes] = []
        self._bytes = 0
        self._oldest_at = 0.0
        self.sent = first

    @property
    def added(self) -> int:
        """Rows of the job, those included that are not sent yet."""
        return self.sent + len(self._pending)

    def full(self, rows: Rows) -> Iterator[Part]:
        """Take rows, and yield each part that is full; the caller sends it, then asks on.

        Raises:
            RequestError: A row cannot become a request. The rows before it were taken.
        """
        for line in self._lines.of(rows):
            if len(line) > MOST_LINE_BYTES:
                raise RequestError(
                    f"row {self.added}: has {len(line)} bytes as a JSON line, and at most "
                    f"{MOST_LINE_BYTES} can be appended"
                )
            if not self._pending:
                self._oldest_at = self._clock()
            self._pending.append(line)
            self._bytes += len(line)
            if self._is_full():
                yield from self.rest()

    def rest(self) -> Iterator[Part]:
        """Yield what is gathered; it counts as sent when the caller asks on."""
        if self._pending:
            yield Part(self.sent, len(self._pending), b"".join(self._pending))
            self.sent += len(self._pending)
            self._pending, self._bytes = [], 0

    def _is_full(self) -> bool:
        return (
            len(self._pending) >= PART_ROWS
            or self._bytes >= PART_BYTES
            or self._clock() - self._oldest_at >= OLDEST_S
        )
