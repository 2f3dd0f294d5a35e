"""What every sink can do, and what it reports. Nothing here imports pyarrow."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from nightjar.jobs.records import ResultRecord


class SinkError(Exception):
    """Results cannot be written; the message says where, why and how to mend it."""


class SinkRefusedError(SinkError):
    """The sink cannot be used as it is described; nothing was done."""


class SinkWriteError(SinkError):
    """Writing has failed; readers see what was there before. Writing again may succeed."""


@dataclass(frozen=True, slots=True)
class SinkCounts:
    """What one `write` has put into the sink."""

    succeeded: int
    failed: int  # rows with an error, wherever they were written
    deleted: int = 0  # rows of earlier runs that left a mirrored table
    left_out: int = 0  # failures without a key of their own, such as a repeated key


class Sink(Protocol):
    """The target of one run.

    One thread at a time; a sink is not shared. `write` is whole or has no effect that a reader
    sees. After a `write` that was killed at any moment, the same `write` in a new process ends
    with exactly one row a key.
    """

    @property
    def target(self) -> str:
        """What the sink writes to, for messages; without passwords."""

    def check(self) -> None:
        """Find what would make `write` fail, before any work is done.

        Raises:
            SinkRefusedError: Rights, columns or room are missing, or the target holds data that
                Nightjar has not written.
        """

    def resume_after(self) -> int:
        """The row index up to which a killed `write` of the same run has kept the results.

        -1 if nothing is kept. The results given to `write` may begin behind it; those up to it are
        skipped.
        """

    def write(self, results: Iterable[ResultRecord]) -> SinkCounts:
        """Write the results, which come in row order, and make them visible at once.

        Raises:
            SinkWriteError: The disk is full, the database has refused the data, or the like.
        """
