"""Bodies of answers: those that land together are one pack (`jobs/store/packs.py`)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from nightjar.jobs.store.bulk import BulkInsert
from nightjar.jobs.store.common import octets
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.packs import cut, pack, unpack
from nightjar.jobs.store.parts import in_parts_of
from nightjar.jobs.store.tables import answer_pack, result

LEAST_TEXTS = 4
"""Fewer answers are stored alone: single calls and suspects."""

MOST_KEPT_BYTES = 32 << 20
"""Of texts that a reader keeps; the packs of a plan's chunk have about 4 MiB."""

_PACKS_AT_ONCE = 16
_pack = answer_pack.c


class Stored(NamedTuple):
    """The columns of a result that hold its body, in the order of the table of results."""

    pack_id: int | None = None
    pack_place: int | None = None
    body_bytes: int | None = None


class AnswerPacks:
    """Stores bodies that land together.

    `NIGHTJAR_PACK_ANSWERS` of the settings is `enabled`: an API of the version before reads no
    packs.
    """

    def __init__(self, database: Database, *, enabled: bool) -> None:
        self._enabled = enabled
        self._insert = BulkInsert(database, answer_pack, ("id", "packed"))

    def store(self, connection: Connection, bodies: Mapping[int, str]) -> dict[int, Stored]:
        """Insert packs of these bodies, by the requests' ids; gives where each is now.

        Those that it does not give are to be stored in their results.
        """
        if not self._enabled or len(bodies) < LEAST_TEXTS:
            return {}
        texts = {id_: bodies[id_].encode() for id_ in sorted(bodies)}
        ids = list(texts)
        packs: list[tuple[int, bytes]] = []
        stored: dict[int, Stored] = {}
        for part in cut([len(text) for text in texts.values()]):
            some = ids[part]
            packs.append((some[0], pack([texts[id_] for id_ in some])))
            stored |= {
                id_: Stored(some[0], place, len(texts[id_])) for place, id_ in enumerate(some)
            }
        self._insert.run(connection, packs)
        return stored


class AnswerBodies:
    """Reads the bodies of results.

    Rows that lie beside each other are in many packs: micro-batches are of like lengths. So what
    was read last stays, for a reader that goes on with the next rows.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[bytes]] = {}  # the one that was used last is at the end
        self._kept_bytes = 0

    def read(self, connection: Connection, rows: Sequence[Row[Any]]) -> dict[int, str]:
        """The bodies by `request_id`; the rows have the columns of results."""
        places = [
            (row.request_id, row.pack_id, row.pack_place) for row in rows if row.pack_id is not None
        ]
        bodies = {id_: body.decode() for id_, body in self.in_packs(connection, places).items()}
        return bodies | {row.request_id: row.body for row in rows if row.body is not None}

    def in_packs(
        self, connection: Connection, places: Sequence[tuple[int, int, int]]
    ) -> dict[int, bytes]:
        """The bodies in UTF-8 by the requests' ids; places: (request, pack, place in the pack)."""
        bodies: dict[int, bytes] = {}
        wanted: dict[int, list[tuple[int, int]]] = {}
        for id_, pack_id, place in places:
            wanted.setdefault(pack_id, []).append((id_, place))
        for pack_id, texts in self._texts(connection, list(wanted)):
            for id_, place in wanted[pack_id]:
                bodies[id_] = texts[place]
        return bodies

    def _texts(
        self, connection: Connection, ids: Sequence[int]
    ) -> Iterator[tuple[int, list[bytes]]]:
        """The texts of each of these packs, those first that are there."""
        for id_ in ids:
            if id_ in self._kept:
                texts = self._kept[id_] = self._kept.pop(id_)
                yield id_, texts
        missing = sorted(id_ for id_ in ids if id_ not in self._kept)
        for begin in range(0, len(missing), _PACKS_AT_ONCE):
            some = missing[begin : begin + _PACKS_AT_ONCE]
            is_given = (_pack.id.in_(some), in_parts_of(_pack.id, some))
            statement = sa.select(_pack.id, _pack.packed).where(*is_given)
            for id_, packed in connection.execute(statement).all():
                texts = unpack(packed)
                self._keep(id_, texts)
                yield id_, texts

    def _keep(self, id_: int, texts: list[bytes]) -> None:
        self._kept[id_] = texts
        self._kept_bytes += sum(map(len, texts))
        while self._kept_bytes > MOST_KEPT_BYTES and len(self._kept) > 1:
            oldest = self._kept.pop(next(iter(self._kept)))
            self._kept_bytes -= sum(map(len, oldest))


def body_octets(*, is_sqlite: bool) -> sa.ColumnElement[int]:
    """How many bytes the body of a result takes; null without one."""
    return sa.func.coalesce(
        result.c.body_bytes, octets(result.c.body, is_sqlite=is_sqlite), type_=sa.BigInteger
    )


def delete_answer_packs(connection: Connection, ids: Collection[int]) -> None:
    """Delete packs; their answers are deleted, or about to be."""
    if ids:
        is_given = (_pack.id.in_(ids), in_parts_of(_pack.id, ids))
        connection.execute(sa.delete(answer_pack).where(*is_given))
