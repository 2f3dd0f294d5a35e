"""Partitions of PostgreSQL, one for each part (`jobs/store/parts.py`): made ahead, dropped whole.

Both go on while others read and write. A partition is attached under a lock that blocks nobody. It
is detached CONCURRENTLY: PostgreSQL waits until nobody uses it any more, and nobody waits for that.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import StoreError
from nightjar.jobs.states import BatchStage
from nightjar.jobs.store.batch_tables import batch
from nightjar.jobs.store.common import today
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.parts import first_job_id, part_of_day, part_of_job
from nightjar.jobs.store.tables import job

logger = logging.getLogger(__name__)

# In the order in which they are dropped.
TABLES = ("result", "answer_pack", "request_body", "body_pack", "request")
DAYS_AHEAD = 2
LEAST_AGE_DAYS = 2
"""Younger parts are not dropped: a submission that began before midnight may still land."""

DETACH_LIMIT_S = 2.0
"""The sweeper waits so long for the last users of a partition, and goes on at its next turn."""

_LOCK = sa.text("SELECT pg_advisory_xact_lock(:key)")
_LOCK_KEY = 0x6E69676874706172  # "nightpar"
# query_canceled, lock_not_available, object_in_use. Another process was faster:
# object_not_in_prerequisite_state, undefined_table.
_LATER = frozenset({"57014", "55P03", "55006", "55000", "42P01"})
_PARTITION = re.compile(rf"({'|'.join(TABLES)})_p([1-9]\d*)")
_FOUND = sa.text("""
SELECT c.relname, i.inhparent IS NOT NULL AS attached,
  coalesce(i.inhdetachpending, false) AS pending
FROM pg_class c LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
WHERE c.relkind = 'r' AND c.relname ~ '_p[1-9][0-9]*$' AND c.relnamespace =
  (SELECT relnamespace FROM pg_class WHERE oid = to_regclass('request'))
""")
_ATTACHED = sa.text(
    "SELECT count(*) FROM unnest(CAST(:names AS text[])) name "
    "JOIN pg_inherits i ON i.inhrelid = to_regclass(name)"
)
_OPTIONS = sa.text(
    "SELECT array_to_string(reloptions, ', ') FROM pg_class WHERE oid = to_regclass(:name)"
)


class Partitions:
    """Makes the partitions of a database and drops them; on SQLite there is nothing to do."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def make_ahead(self) -> None:
        """Make the partitions of today and of the next days."""
        if self._database.is_sqlite:
            return
        first = part_of_day(today())
        for part in range(first, first + DAYS_AHEAD + 1):
            self._database.write(partial(make_part, part=part))

    def is_old(self, part: int) -> bool:
        """Whether the part may be dropped as soon as nobody needs its rows."""
        return not self._database.is_sqlite and 0 < part <= part_of_day(today()) - LEAST_AGE_DAYS

    def old(self) -> list[int]:
        """Parts that are old enough and have partitions, also such that wait to be dropped."""
        if self._database.is_sqlite:
            return []
        with self._database.reading() as connection:
            found = {part for _, part, _, _ in _partitions(connection)}
        return sorted(part for part in found if self.is_old(part))

    def is_needed(self, part: int) -> bool:
        """Whether a job of the part is not marked as purged, or is still to land."""
        ids = (first_job_id(part), first_job_id(part + 1))
        kept = sa.select(job.c.id).where(
            job.c.id >= ids[0], job.c.id < ids[1], job.c.purged_at.is_(None), ~job.c.live
        )
        arriving = sa.select(batch.c.job_id).where(
            batch.c.job_id >= ids[0],
            batch.c.job_id < ids[1],
            batch.c.stage == BatchStage.VALIDATING,
        )
        with self._database.reading() as connection:
            return any(connection.scalar(one.limit(1)) is not None for one in (kept, arriving))

    def drop(self, part: int) -> bool:
        """Drop the partitions of a part that nobody needs; whether all of them are gone.

        An old transaction may still use them: then they are gone after a later call.
        """
        try:
            with self._apart() as connection:
                for name, found, attached, pending in _partitions(connection):
                    if found == part:
                        _drop(connection, name, attached=attached, pending=pending)
        except StoreError as error:
            driver_error = getattr(error.__cause__, "orig", None)
            if getattr(driver_error, "sqlstate", None) not in _LATER:
                raise
            return False
        logger.info("dropped the partitions of part %d", part, extra={"action": "drop_partition"})
        return True

    @contextmanager
    def _apart(self) -> Iterator[Connection]:
        """A connection each of whose statements is a transaction, and may take a moment only."""
        from nightjar.jobs.store import postgres  # noqa: PLC0415 - psycopg is an extra

        with self._database.reading() as connection:
            driver: Any = connection.connection.driver_connection
            postgres.limit_on_server(driver, DETACH_LIMIT_S)
            try:
                yield connection
            finally:
                connection.invalidate()  # its limits are not those of others


def _partitions(connection: Connection) -> list[tuple[str, int, bool, bool]]:
    """(name, part, whether it is attached, whether a detachment waits), in the order of TABLES."""
    found = []
    for row in connection.execute(_FOUND):
        if match := _PARTITION.fullmatch(row.relname):
            place = TABLES.index(match[1])
            found.append((int(match[2]), place, row.relname, row.attached, row.pending))
    return [(name, part, attached, pending) for part, _, name, attached, pending in sorted(found)]


def ensure_part(database: Database, connection: Connection, job_id: str) -> None:
    """Make the partitions of a job that is about to land, unless they are there.

    In a transaction of its own, so that two submissions do not wait for each other.
    """
    part = part_of_job(job_id)
    if not database.is_sqlite and part:
        with connection.begin():
            make_part(connection, part)


def make_part(connection: Connection, part: int) -> None:
    """Make and attach what is missing of a part, with the options of the first partitions."""
    names = {"names": [f"{table}_p{part}" for table in TABLES]}
    if connection.scalar(_ATTACHED, names) == len(TABLES):
        return
    connection.execute(_LOCK, {"key": _LOCK_KEY})
    for table, is_left in _missing(connection, part).items():
        name = f"{table}_p{part}"
        if is_left:  # of a part that was purged and is submitted to once more
            connection.exec_driver_sql(f"DROP TABLE {name}")
        options = connection.scalar(_OPTIONS, {"name": f"{table}_p0"})
        stored = f" WITH ({options})" if options else ""
        connection.exec_driver_sql(
            f"CREATE TABLE {name} (LIKE {table}_p0 INCLUDING DEFAULTS INCLUDING INDEXES "
            f"INCLUDING STORAGE INCLUDING COMPRESSION){stored}"
        )
        connection.exec_driver_sql(
            f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES IN ({part})"
        )


def _missing(connection: Connection, part: int) -> dict[str, bool]:
    """Tables without an attached partition of the part; whether a detached one is left."""
    found = {name: attached for name, of, attached, _ in _partitions(connection) if of == part}
    names = {table: f"{table}_p{part}" for table in reversed(TABLES)}
    return {table: name in found for table, name in names.items() if not found.get(name, False)}


def _drop(connection: Connection, name: str, *, attached: bool, pending: bool) -> None:
    table = name.rpartition("_p")[0]
    if attached:
        how = "FINALIZE" if pending else "CONCURRENTLY"
        connection.exec_driver_sql(f"ALTER TABLE {table} DETACH PARTITION {name} {how}")
    connection.exec_driver_sql(f"DROP TABLE IF EXISTS {name}")
