"""A SQLite database that another process holds."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from nightjar.jobs.store.all_tables import metadata
from nightjar.jobs.store.database import database_url as usable_url


@contextmanager
def locked(url: str, tables: Iterable[str] = tuple(metadata.tables)) -> Iterator[None]:
    """Nobody else writes into these tables within the block; readers go on."""
    parsed = usable_url(url)
    is_sqlite = parsed.get_backend_name() == "sqlite"
    options = {"connect_args": {"timeout": 60}} if is_sqlite else {}
    engine = sa.create_engine(parsed, poolclass=sa.NullPool, **options)
    with engine.connect() as connection:
        if is_sqlite:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            _lock(connection, tables)
        yield
        connection.rollback()


def _lock(connection: sa.Connection, tables: Iterable[str]) -> None:
    """Tables are locked one after another, so a transaction that writes into them in another order
    may wait for this one, and this one for it: PostgreSQL ends one of the two."""
    names = ", ".join(sorted(tables))
    for left in reversed(range(10)):
        try:
            connection.exec_driver_sql(f"LOCK TABLE {names} IN EXCLUSIVE MODE")
        except sa.exc.OperationalError:
            connection.rollback()
            if not left:
                raise
        else:
            return
