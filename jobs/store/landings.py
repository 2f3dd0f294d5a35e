"""The order of landing: the order in which a job's results became visible.

Each transaction that lands results adds one row to `landing`, with the ids of their requests. Its
position comes from the job's row, under the lock that counting takes anyway and holds until the
commit. So a reader that sees a position sees every position before it. Of a database sequence, a
number could become visible before a smaller one.
"""

import secrets
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from nightjar.jobs.store.database import Database
from nightjar.jobs.store.parts import InPartOf
from nightjar.jobs.store.tables import job, landing, result

UNNUMBERED_PER_STEP = 2_000
_INSERT = "INSERT INTO landing (job_id, first, token, request_ids) VALUES (?, ?, ?, ?)"
_NEXT = (
    sa.update(job)
    .where(job.c.id == sa.bindparam("numbered_job"))
    .values(landed=job.c.landed + sa.bindparam("more_landed", type_=sa.BigInteger))
    .returning(job.c.landed)
)
# Results of processes of the version before, which write no order.
_UNNUMBERED = (
    sa.select(result.c.request_id, result.c.row_index)
    .where(
        result.c.job_id == sa.bindparam("job", type_=sa.Text),
        InPartOf(result.c.request_id, sa.bindparam("job", type_=sa.Text)),
        result.c.row_index > sa.bindparam("after"),
        result.c.landing.is_(None),
    )
    .order_by(result.c.row_index)
    .limit(UNNUMBERED_PER_STEP)
    .with_for_update()
)


def new_token() -> int:
    """A random number that a landing and its results share."""
    return secrets.randbits(63)


class CountAndNote:
    """Runs `count`, an update of the job's row, and adds a landing at the position that it gives.

    On PostgreSQL both are one statement, so that landing costs no further round trip.
    """

    def __init__(self, database: Database, count: sa.sql.dml.ReturningUpdate[Any]) -> None:
        self._is_sqlite = database.is_sqlite
        self._statement: sa.sql.base.Executable = count
        if self._is_sqlite:
            return
        counted = count.cte("counted")
        places = sa.bindparam("more_landed", type_=sa.BigInteger)
        noted = sa.select(
            sa.bindparam("counted_job", type_=sa.String),
            counted.c.landed - places,
            sa.bindparam("token", type_=sa.BigInteger),
            sa.bindparam("request_ids", type_=sa.LargeBinary),
        )
        names = ["job_id", "first", "token", "request_ids"]
        note = sa.insert(landing).from_select(names, noted).cte("noted")
        self._statement = sa.select(counted).add_cte(note)

    def run(
        self,
        connection: Connection,
        job_id: str,
        added: Mapping[str, int],
        token: int,
        ids: Sequence[int],
    ) -> Row[Any]:
        """What the update returns; `added` are its parameters."""
        values: dict[str, Any] = {"counted_job": job_id, "more_landed": len(ids), **added}
        if not self._is_sqlite:
            values |= {"token": token, "request_ids": pack_ids(ids)}
        counted = connection.execute(self._statement, values).one()
        if self._is_sqlite:
            row = (job_id, counted.landed - len(ids), token, pack_ids(ids))
            connection.exec_driver_sql(_INSERT, row)
        return counted


def pack_ids(ids: Sequence[int]) -> bytes:
    """Ids of requests as bytes."""
    return struct.pack(f"<{len(ids)}q", *ids)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """The ids that `pack_ids` was given."""
    return struct.unpack(f"<{len(packed) // 8}q", packed)


def note(connection: Connection, job_id: str, ids: Sequence[int], token: int) -> None:
    """Add results that carry the token already to the end of the job's order."""
    landed = connection.scalar(_NEXT, {"numbered_job": job_id, "more_landed": len(ids)}) or 0
    row = {"job_id": job_id, "first": landed - len(ids), "token": token}
    connection.execute(sa.insert(landing).values({**row, "request_ids": pack_ids(ids)}))


def number_some(connection: Connection, job_id: str, after: int) -> int | None:
    """Add some results to the order that are not in it, of rows behind `after`.

    Returns the last row that was added; None if none is left.
    """
    rows = connection.execute(_UNNUMBERED, {"job": job_id, "after": after}).all()
    if not rows:
        return None
    ids, token = [row.request_id for row in rows], new_token()
    numbered = sa.update(result).where(
        result.c.request_id.in_(ids), InPartOf(result.c.request_id, job_id)
    )
    connection.execute(numbered.values(landing=token))
    note(connection, job_id, ids, token)
    return int(rows[-1].row_index)


def is_numbered(connection: Connection, job_id: str) -> bool:
    """Whether every result of the job is in the order."""
    ended = job.c.completed + job.c.failed + job.c.cancelled
    statement = sa.select(job.c.landed - job.c.taken_back >= ended).where(job.c.id == job_id)
    return bool(connection.scalar(statement))


def ids_from(connection: Connection, job_id: str, place: int, most: int) -> list[tuple[int, int]]:
    """(request id, token of its landing) of up to `most` positions, from `place` on."""
    first = landing.c.first
    of_job = landing.c.job_id == job_id
    holds = sa.select(sa.func.max(first)).where(of_job, first <= place).scalar_subquery()
    statement = (
        sa.select(first, landing.c.token, landing.c.request_ids)
        .where(of_job, first >= sa.func.coalesce(holds, 0), first < place + most)
        .order_by(first)
    )
    found: list[tuple[int, int]] = []
    for begins, token, packed in connection.execute(statement):
        ids = unpack_ids(packed)[max(place - begins, 0) : place + most - begins]
        found += [(id_, token) for id_ in ids]
    return found
