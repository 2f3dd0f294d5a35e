"""Bodies of requests: in packs of consecutive rows (`jobs/store/packs.py`), or alone.

Alone are those of single calls, and of jobs that an API of the version before has submitted.
"""

import sys
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.store.common import octets
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.packs import MOST_TEXTS, unpack
from nightjar.jobs.store.parts import in_parts_of, part_of_job
from nightjar.jobs.store.tables import body_pack, request, request_body

_PACKS_AT_ONCE = 16
_pack = body_pack.c
_of_job = (_pack.job_id == sa.bindparam("of_job"), _pack.part == sa.bindparam("part"))
_SIZES = (
    sa.select(_pack.first_row, _pack.rows, _pack.bytes)
    .where(*_of_job, _pack.first_row.between(sa.bindparam("first"), sa.bindparam("last")))
    .order_by(_pack.first_row)
)
_PACKED = sa.select(_pack.first_row, _pack.packed).where(
    *_of_job, _pack.first_row.in_(sa.bindparam("firsts", expanding=True))
)
_DELETE_TO = sa.delete(body_pack).where(*_of_job, _pack.first_row <= sa.bindparam("last"))
_ALONE: sa.ColumnElement[str] = sa.func.coalesce(request_body.c.body, request.c.body)


class Row(NamedTuple):
    """A request whose body is wanted."""

    id: int
    row_index: int


class _Pack(NamedTuple):
    first: int
    rows: int
    bytes: int


class Bodies:
    """Reads the bodies of requests."""

    def __init__(self, database: Database) -> None:
        self._is_sqlite = database.is_sqlite

    def read(
        self,
        connection: Connection,
        job_id: str,
        rows: Sequence[Row],
        most_bytes: int | None = None,
        longest: int | None = None,
    ) -> dict[int, bytes]:
        """Bodies of rows of one job, by the requests' ids; rows without one are left out.

        Args:
            connection: In a transaction.
            job_id: The job.
            rows: In the order of their indexes.
            most_bytes: Read the first rows only, whose bodies have so many bytes; at least one.
                The sizes are read before any body is. The last pack may hold more.
            longest: Leave out bodies of more bytes.
        """
        packs = _packs_of(connection, job_id, [row.row_index for row in rows])
        sizes = self._sizes_alone(
            connection, [row.id for row in rows if row.row_index not in packs]
        )
        if most_bytes is not None:
            rows = rows[: _fitting(rows, packs, sizes, most_bytes)]
        limit = sys.maxsize if longest is None else longest
        fits = [row.id for row in rows if row.id in sizes and sizes[row.id] <= limit]
        found = self._read_alone(connection, fits)
        wanted: dict[int, list[Row]] = {}
        for row in rows:
            own = packs.get(row.row_index)
            if own is not None and (own.rows > 1 or own.bytes <= limit):
                wanted.setdefault(own.first, []).append(row)
        for first, texts in _texts(connection, job_id, sorted(wanted)):
            for row in wanted[first]:
                text = texts[row.row_index - first]
                if text and len(text) <= limit:
                    found[row.id] = text
        return found

    def _sizes_alone(self, connection: Connection, ids: Collection[int]) -> dict[int, int]:
        """The bytes of bodies that are in no pack, by the requests' ids."""
        if not ids:
            return {}
        size = octets(_ALONE, is_sqlite=self._is_sqlite)
        statement = _alone(ids, size).where(_ALONE.is_not(None))
        return dict(connection.execute(statement).all())

    def _read_alone(self, connection: Connection, ids: Collection[int]) -> dict[int, bytes]:
        if not ids:
            return {}
        return {id_: body.encode() for id_, body in connection.execute(_alone(ids, _ALONE))}


def delete_bodies_alone(connection: Connection, request_ids: Collection[int]) -> None:
    """Delete the bodies of requests that are in no pack."""
    column = request_body.c.request_id
    is_given = (column.in_(request_ids), in_parts_of(column, request_ids))
    connection.execute(sa.delete(request_body).where(*is_given))


def delete_packs(connection: Connection, job_id: str, last: int = sys.maxsize) -> None:
    """Delete the packs of a job that begin at this row or before; later rows of one go, too."""
    connection.execute(_DELETE_TO, {**_key(job_id), "last": last})


def _alone(ids: Collection[int], *columns: sa.ColumnElement[Any]) -> sa.Select[int, Any]:
    of_request = sa.and_(
        request_body.c.request_id == request.c.id, in_parts_of(request_body.c.request_id, ids)
    )
    return (
        sa.select(request.c.id, *columns)
        .join_from(request, request_body, of_request, isouter=True)
        .where(request.c.id.in_(ids), in_parts_of(request.c.id, ids))
    )


def _key(job_id: str) -> dict[str, object]:
    return {"of_job": job_id, "part": part_of_job(job_id)}


def _packs_of(connection: Connection, job_id: str, indexes: Sequence[int]) -> Mapping[int, _Pack]:
    """The pack of each row that is in one, by the row's index; `indexes` are in order."""
    found: list[_Pack] = []
    for first, last in _runs(indexes):
        # A pack with the first row begins so far before it at most.
        within = {"first": first - MOST_TEXTS + 1, "last": last}
        found += [_Pack(*row) for row in connection.execute(_SIZES, _key(job_id) | within)]
    begins = [one.first for one in found]
    packs: dict[int, _Pack] = {}
    for index in indexes:
        place = bisect_right(begins, index) - 1
        if place >= 0 and index < begins[place] + found[place].rows:
            packs[index] = found[place]
    return packs


def _runs(indexes: Sequence[int]) -> Iterable[tuple[int, int]]:
    """The first and the last of each run of rows that lie closer together than two packs."""
    if not indexes:
        return
    first = indexes[0]
    for one, following in pairwise(indexes):
        if following - one > 2 * MOST_TEXTS:
            yield first, one
            first = following
    yield first, indexes[-1]


def _fitting(
    rows: Sequence[Row], packs: Mapping[int, _Pack], alone: Mapping[int, int], most_bytes: int
) -> int:
    """How many rows from the first on to read, so that their bodies have about so many bytes.

    The pack in which the limit lies is read whole, unless it is a single large body.
    """
    total = 0
    counted: set[int] = set()
    for place, row in enumerate(rows):
        own = packs.get(row.row_index)
        if own is not None and own.first in counted:
            continue
        size = alone.get(row.id, 0) if own is None else own.bytes
        is_bounded = own is not None and own.rows > 1
        if place and (total > most_bytes or (total + size > most_bytes and not is_bounded)):
            return place
        total += size
        if own is not None:
            counted.add(own.first)
    return len(rows)


def _texts(
    connection: Connection, job_id: str, firsts: Sequence[int]
) -> Iterable[tuple[int, list[bytes]]]:
    """The texts of each of these packs; a few packs are in memory at once."""
    for begin in range(0, len(firsts), _PACKS_AT_ONCE):
        some = firsts[begin : begin + _PACKS_AT_ONCE]
        for first, packed in connection.execute(_PACKED, _key(job_id) | {"firsts": some}).all():
            yield first, unpack(packed)
