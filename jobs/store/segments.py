"""Token ids as compact bytes: int32 little-endian [count, length..., ids...].

They are stored with the request when it is planned, so that workers do not
tokenize again.
"""

import sys
from array import array
from collections.abc import Sequence

import numpy as np

from nightjar.jobs.errors import StoreError

_INT32 = np.dtype("<i4")


def pack_segments(segments: Sequence[Sequence[int]]) -> bytes:
    """The bytes of one or more token-id lists; ids lie in [0, 2**31)."""
    flat = [len(segments), *map(len, segments)]
    for segment in segments:
        flat += segment
    try:
        values = array("i", flat)
    except (OverflowError, TypeError) as error:
        raise StoreError("token ids must be integers below 2**31") from error
    if min(flat) < 0:
        raise StoreError("token ids must not be negative")
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpack_segments(data: bytes) -> list[list[int]]:
    """The token-id lists behind `pack_segments`; StoreError if the bytes are damaged."""
    if len(data) < 4 or len(data) % 4:
        raise StoreError(f"{len(data)} bytes are not packed token ids")
    values: list[int] = np.frombuffer(data, dtype=_INT32).tolist()
    count = values[0]
    start = 1 + count
    lengths = values[1:start]
    if count < 0 or len(lengths) != count or start + sum(lengths) != len(values):
        raise StoreError("the lengths of packed token ids do not add up")
    segments = []
    for length in lengths:
        segments.append(values[start : start + length])
        start += length
    return segments
