"""The newest request and micro-batch, which are not deleted.

SQLite gives the id of the newest row again once that row is deleted. A late message must not find
another micro-batch under its id.
"""

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.store.tables import micro_batch, request

_REQUEST, _MICRO_BATCH = (
    sa.select(table.c.id, table.c.job_id).order_by(table.c.id.desc()).limit(1)
    for table in (request, micro_batch)
)


@dataclass(frozen=True, slots=True)
class NewestRows:
    """Ids of the newest rows; 0 where there is none."""

    request_id: int
    micro_batch_id: int
    job_ids: frozenset[str]  # whose rows they are


def newest_rows(connection: Connection) -> NewestRows:
    """The newest rows at this moment."""
    rows = [connection.execute(one).one_or_none() for one in (_REQUEST, _MICRO_BATCH)]
    first, second = (0 if row is None else row.id for row in rows)
    return NewestRows(first, second, frozenset(row.job_id for row in rows if row is not None))
