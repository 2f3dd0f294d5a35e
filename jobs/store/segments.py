"""Token ids as compact bytes: int32 little-endian [count, length..., ids...].

Digests of requests are made of them, so they never change. Planners of the version before stored
them in each request's row; now plans are stored as `jobs/store/token_ids.py` says.
"""

import struct
import sys
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

from nightjar.jobs.errors import StoreError


def pack_segments(segments: Sequence[Sequence[int]]) -> bytes:
    """The bytes of one or more token-id lists; ids lie in [0, 2**31)."""
    lengths = [len(segment) for segment in segments]
    count = 1 + len(lengths) + sum(lengths)
    try:
        data = struct.pack(f"<{count}i", len(lengths), *lengths, *chain.from_iterable(segments))
    except struct.error as error:
        raise StoreError("token ids must be integers below 2**31") from error
    if not data[3::4].isascii():  # the last byte of each number, whose top bit is the sign
        raise StoreError("token ids must not be negative")
    return data


def unpack_segments(data: bytes) -> list[list[int]]:
    """Read what `pack_segments` wrote; raises StoreError if the bytes are damaged."""
    if len(data) < 4 or len(data) % 4:
        raise StoreError(f"{len(data)} bytes are not packed token ids")
    values = _int32s(data)
    count = values[0]
    if count == 1 and values[1:2] == [len(values) - 2]:  # nearly all: a prompt
        return [values[2:]]
    start = 1 + count
    lengths = values[1:start]
    if count < 0 or len(lengths) != count or start + sum(lengths) != len(values):
        raise StoreError("the lengths of packed token ids do not add up")
    bounds = accumulate(lengths, initial=start)
    return [values[begin:end] for begin, end in pairwise(bounds)]


def _int32s(data: bytes) -> list[int]:
    if sys.byteorder == "little":
        return memoryview(data).cast("i").tolist()  # half the time of struct
    return list(struct.unpack(f"<{len(data) // 4}i", data))
