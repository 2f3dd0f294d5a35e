"""What passes between the store and whoever appends rows to an open job."""

from dataclasses import dataclass

MOST_ROWS = 10_000
"""Rows of one part."""

MOST_PART_BYTES = 16 << 20

MOST_ROWS_AHEAD = 100_000
"""Rows of an open job that may be without outcome; a producer that is faster has to wait."""


@dataclass(frozen=True, slots=True)
class Appended:
    """What an append did.

    total: Rows that the job has now.
    rejected: How many of the part's rows cannot be used.
    existing: The part was there already.
    """

    total: int
    rejected: int
    existing: bool = False
