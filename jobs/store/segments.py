"""Token ids as planners of the version before have stored them, in each request's row.

int32 little-endian: [count, length..., ids...]. Planners write `jobs/store/token_ids.py` now.
"""

import struct
import sys
from itertools import accumulate, pairwise

from nightjar.jobs.errors import StoreError


def unpack_segments(data: bytes) -> list[list[int]]:
    """Read the segments of a request; raises StoreError if the bytes are damaged."""
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
