"""Packs: texts that are stored together, compressed by zstd.

Rows of one job are alike, so that a thousand of them together take a third of what they take alone.
A pack is one value of the database: a text of it costs no index entry, no row's header and no
record of the log of its own.
"""

import threading
from collections.abc import Iterator, Sequence

import zstandard

from nightjar.jobs.errors import StoreError

MOST_TEXTS = 1_000
MOST_BYTES = 1 << 20
"""Of the texts, before compression. Who wants one text of a pack decompresses all of them."""

_LEVEL = 6  # the next one saves half as much again for the same time
_QUICK_LEVEL = 1
_END = b"\n"  # JSON that `dump_json` writes holds none


class _Codecs(threading.local):
    """A compressor for each thread: none may be used by two at once."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=_LEVEL).compress
        self.compress_quickly = zstandard.ZstdCompressor(level=_QUICK_LEVEL).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_codecs = _Codecs()


def cut(sizes: Sequence[int]) -> Iterator[slice]:
    """Cut texts of these sizes in bytes into packs; one that is larger than a pack is alone."""
    begin = total = 0
    for place, size in enumerate(sizes):
        if place > begin and (total + size > MOST_BYTES or place - begin == MOST_TEXTS):
            yield slice(begin, place)
            begin, total = place, 0
        total += size
    if sizes:
        yield slice(begin, len(sizes))


def pack(texts: Sequence[bytes]) -> bytes:
    """The bytes that stand for these texts of JSON, none of which holds a line feed."""
    return _codecs.compress(_END.join(texts))


def unpack(packed: bytes) -> list[bytes]:
    """The texts that `pack` was given; raises StoreError if the bytes are damaged."""
    return decompress(packed).split(_END)


def compress(data: bytes) -> bytes:
    """Compress what is read once, and soon."""
    return _codecs.compress_quickly(data)


def decompress(data: bytes) -> bytes:
    """What was compressed; raises StoreError if the bytes are damaged."""
    try:
        return _codecs.decompress(data)
    except zstandard.ZstdError as error:
        raise StoreError(f"{len(data)} bytes cannot be decompressed: {error}") from error
