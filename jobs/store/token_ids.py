"""What workers need to compute a micro-batch, as its plan stores it: token ids, and what is asked.

So they neither tokenize nor read bodies. The parts of the token ids, all little-endian:

1. Three uint32: the bytes of a token id, with the bit `_COMPRESSED` if what follows the ids is
   compressed; the number of requests; the number of segments.
2. Each request's id, as int64.
3. Each request's number of segments, as uint32.
4. Each segment's length, as uint32.
5. All token ids, of two bytes each if all of them are below 2**16, else of four.
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, islice, pairwise

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import StoreError
from nightjar.jobs.records import EncodedRequest
from nightjar.jobs.store.bodies import dump_body
from nightjar.jobs.store.packs import compress, decompress, pack, unpack
from nightjar.jobs.store.tables import micro_batch_tokens

Segments = Sequence[Sequence[int]]

_HEADER = struct.Struct("<3I")
_CODES = {2: "H", 4: "i"}
_COMPRESSED = 0x100  # by a quarter; PostgreSQL's own way takes longer and finds less
_row = micro_batch_tokens.c
_OF = sa.select(_row.token_ids, _row.asked).where(
    _row.micro_batch_id == sa.bindparam("micro_batch")
)
_DROP = sa.delete(micro_batch_tokens).where(
    _row.micro_batch_id.in_(sa.bindparam("micro_batches", expanding=True))
)


def pack_token_ids(requests: Mapping[int, Segments]) -> bytes:
    """The bytes of each request's segments, by its id; token ids lie in [0, 2**31).

    Raises:
        StoreError: A token id is no such integer.
    """
    segments = list(chain.from_iterable(requests.values()))
    try:
        tokens = _narrowest(segments)
    except (OverflowError, TypeError) as error:
        raise StoreError("token ids must be integers below 2**31") from error
    if tokens.typecode == "i" and tokens and min(tokens) < 0:
        raise StoreError("token ids must not be negative")
    parts = (
        array("I", map(len, requests.values())),
        array("I", map(len, segments)),
        tokens,
    )
    header = _HEADER.pack(tokens.itemsize | _COMPRESSED, len(requests), len(segments))
    ids = _little_endian(array("q", requests))
    return header + ids + compress(b"".join(map(_little_endian, parts)))


def bytes_of_list(requests: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
    """How many of the first bytes `unpack_ids` needs for so many requests."""
    return requests * 8 + _HEADER.size


def unpack_ids(data: bytes) -> list[int]:
    """The requests whose token ids `pack_token_ids` wrote; raises StoreError if damaged."""
    try:
        _, requests, _ = _HEADER.unpack_from(data)
        found = _values("q", data[_HEADER.size : _HEADER.size + 8 * requests])
    except (struct.error, ValueError) as error:
        raise StoreError(f"{len(data)} bytes are no list of requests") from error
    if len(found) != requests:
        raise StoreError("a list of requests is cut off")
    return found


def unpack_token_ids(data: bytes) -> dict[int, list[list[int]]]:
    """Read what `pack_token_ids` wrote; raises StoreError if the bytes are damaged."""
    try:
        width, requests, count = _HEADER.unpack_from(data)
        if width & _COMPRESSED:
            width ^= _COMPRESSED
            end = _HEADER.size + 8 * requests
            data = data[:end] + decompress(data[end:])
        ends = list(accumulate((8 * requests, 4 * requests, 4 * count), initial=_HEADER.size))
        ids, counts, lengths, tokens = (
            _values(code, data[begin:end])
            for code, begin, end in zip(
                ("q", "I", "I", _CODES[width]), ends, [*ends[1:], len(data)], strict=True
            )
        )
    except (struct.error, KeyError, ValueError) as error:
        raise StoreError(f"{len(data)} bytes are not packed token ids") from error
    whole = len(ids) == len(counts) == requests and len(lengths) == count
    if not whole or sum(counts) != count or sum(lengths) != len(tokens):
        raise StoreError("the lengths of packed token ids do not add up")
    segments = (tokens[begin:end] for begin, end in pairwise(accumulate(lengths, initial=0)))
    return {id_: list(islice(segments, many)) for id_, many in zip(ids, counts, strict=True)}


def pack_asked(requests: Sequence[EncodedRequest]) -> bytes | None:
    """What workers need of the requests' bodies; None where a planner does not say it."""
    texts = [dump_body(one.asked).encode() for one in requests if one.asked is not None]
    return pack(texts) if len(texts) == len(requests) else None


def unpack_asked(packed: bytes | None, ids: Iterable[int]) -> dict[int, bytes]:
    """Read what `pack_asked` wrote for the requests with these ids; nothing for None."""
    return {} if packed is None else dict(zip(ids, unpack(packed), strict=True))


def move_token_ids(
    connection: Connection, source: int, target: int, requests: Sequence[int]
) -> None:
    """Give a micro-batch the token ids of some requests of another; those of that one stay."""
    found = connection.execute(_OF, {"micro_batch": source}).one_or_none()
    if found is None:
        return  # a planner of the version before has put them elsewhere
    held = unpack_token_ids(found.token_ids)
    asked = unpack_asked(found.asked, held)
    values = {
        "micro_batch_id": target,
        "token_ids": pack_token_ids({id_: held[id_] for id_ in requests}),
        "asked": pack([asked[id_] for id_ in requests]) if asked else None,
    }
    connection.execute(sa.insert(micro_batch_tokens).values(values))


def drop_token_ids(connection: Connection, *micro_batches: int) -> None:
    """Forget the token ids of micro-batches that nobody computes any more."""
    if micro_batches:
        connection.execute(_DROP, {"micro_batches": list(micro_batches)})


def _narrowest(segments: Segments) -> "array[int]":
    try:
        return array("H", chain.from_iterable(segments))
    except OverflowError:
        return array("i", chain.from_iterable(segments))


def _little_endian(values: "array[int]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _values(code: str, data: bytes) -> list[int]:
    values = array(code, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
