"""Schemas of PostgreSQL: an empty one, and ones with tables that many tests use one by one.

To make the tables takes the server a tenth of a second, and hundreds of tests need them.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import make_url

SMALL_BYTES = 64 << 10
"""PostgreSQL plans for a table of up to so many bytes as for a new one, until it has counted its
rows (`reltuples`)."""

_END_OTHERS = sa.text(
    # A process that a test has killed may have left a transaction behind.
    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = :name"
)
_SHAPE = sa.text("""
WITH ours AS (SELECT * FROM pg_class WHERE relnamespace = to_regnamespace(:name)),
found AS (
  SELECT format('%s %s %s %s', relname, relkind, reloptions, relacl) AS line FROM ours
  UNION ALL
  SELECT format('%s %s %s %s', relname, attname, format_type(atttypid, atttypmod), attnotnull)
    FROM pg_attribute JOIN ours ON attrelid = ours.oid WHERE attnum > 0
  UNION ALL
  SELECT format('%s %s', relname, conname) FROM pg_constraint JOIN ours ON conrelid = ours.oid
  UNION ALL
  SELECT format('%s %s', relname, indisvalid) FROM pg_index JOIN ours ON indexrelid = ours.oid
  UNION ALL
  SELECT format('statistics of %s', relname) FROM pg_statistic JOIN ours ON starelid = ours.oid
)
SELECT string_agg(line, ',' ORDER BY line) FROM found
""")
_EMPTYING = sa.text("""
SELECT format(
  CASE WHEN pg_table_size(oid) <= :small AND reltuples < 0
    THEN 'DELETE FROM %s' ELSE 'TRUNCATE %s CASCADE' END, oid::regclass)
FROM pg_class
WHERE relnamespace = to_regnamespace(:name) AND relkind = 'r' AND relname <> 'alembic_version'
  AND (pg_relation_size(oid) > 0 OR reltuples >= 0)
""")
_RESTART_IDS = sa.text(
    "SELECT setval(oid, 1, false) FROM pg_class "
    "WHERE relnamespace = to_regnamespace(:name) AND relkind = 'S'"
)


def new_name() -> str:
    """A schema's name that no test has had."""
    return f"nightjar_{uuid.uuid4().hex}"


def url_of(server_url: str, name: str) -> str:
    """The URL by which a schema alone is seen; who connects by it can be found by its name."""
    url = make_url(server_url).set(drivername="postgresql+psycopg")
    settings = {"options": f"-csearch_path={name}", "application_name": name}
    return url.update_query_dict(settings).render_as_string(hide_password=False)


@contextmanager
def administering(server_url: str) -> Iterator[sa.Connection]:
    """A connection each of whose statements is a transaction."""
    engine = _engine(server_url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def drop(admin: sa.Connection, name: str) -> None:
    """Drop a schema; who is connected to it is cut off."""
    admin.execute(_END_OTHERS, {"name": name})
    admin.exec_driver_sql(f'DROP SCHEMA "{name}" CASCADE')


class Schemas:
    """Schemas with tables; `make` makes the tables in the empty schema of a URL.

    A schema of which a test has changed more than rows is dropped.
    """

    def __init__(self, server_url: str, make: Callable[[str], None]) -> None:
        self._server_url, self._make = server_url, make
        self._engine = _engine(server_url, pool_size=1, pool_pre_ping=True)
        self._free: list[str] = []
        self._shape: str | None = None

    @contextmanager
    def lent(self) -> Iterator[str]:
        """The URL of a schema with tables and without rows."""
        name = new_name()
        with self._engine.connect() as admin:
            if self._free:
                # What a test before has left running must not find it.
                admin.exec_driver_sql(f'ALTER SCHEMA "{self._free.pop()}" RENAME TO "{name}"')
            else:
                admin.exec_driver_sql(f'CREATE SCHEMA "{name}"')
                self._make(url_of(self._server_url, name))
                self._shape = self._shape or _shape_of(admin, name)
        yield url_of(self._server_url, name)
        with self._engine.connect() as admin:
            admin.execute(_END_OTHERS, {"name": name})
            if _shape_of(admin, name) == self._shape:
                _empty(admin, name)
                self._free.append(name)
            else:
                drop(admin, name)

    def close(self) -> None:
        """Drop the schemas that are not lent."""
        with self._engine.connect() as admin:
            for name in self._free:
                drop(admin, name)
        self._engine.dispose()


def _engine(server_url: str, **options: Any) -> sa.Engine:
    url = make_url(server_url).set(drivername="postgresql+psycopg")
    return sa.create_engine(url, isolation_level="AUTOCOMMIT", **options)


def _shape_of(admin: sa.Connection, name: str) -> str:
    shape: str = admin.execute(_SHAPE, {"name": name}).scalar_one()
    return shape


def _empty(admin: sa.Connection, name: str) -> None:
    used = admin.execute(_EMPTYING, {"name": name, "small": SMALL_BYTES}).scalars()
    without_keys = "SET LOCAL session_replication_role = replica"
    admin.exec_driver_sql("; ".join(["BEGIN", without_keys, *used, "COMMIT"]))
    admin.execute(_RESTART_IDS, {"name": name})
