"""Migrations: Alembic brings a database's tables to a revision, without an alembic.ini.

Other processes go on with their work. On PostgreSQL everybody waits behind a change of a table that
itself waits for a long transaction. So a change waits a moment only, lets the others go first and
tries again.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import text
from sqlalchemy.engine import URL, Connection
from sqlalchemy.pool import NullPool

from nightjar.jobs.errors import NoSessionError, StoreUnavailableError
from nightjar.jobs.store.database import open_engine, translated_errors

logger = logging.getLogger(__name__)

# The key of PostgreSQL's advisory lock: one migration at a time.
_MIGRATION_LOCK = 0x6E696768746A6172  # "nightjar"
LOCK_TIMEOUT_MS = 2_000
_RETRY_S = 1.0
_LOCK_LOOK_S = 0.2
_LOCK_NOT_AVAILABLE = "55P03"

Operation = Callable[[Config, str], None]


def alembic_config() -> Config:
    """Alembic's settings; the revisions are found in the package, installed or not."""
    config = Config()
    config.set_main_option("script_location", "nightjar:migrations")
    return config


def migrate(url: URL, revision: str = "head") -> None:
    """Bring the tables to `revision`; a second process waits for the first.

    SQLite takes all revisions in one transaction. PostgreSQL takes each in one of its own, so that
    no table stays locked through the work on another; a run that is interrupted goes on when it is
    run again.
    """
    _run(url, command.upgrade, revision)


def revert(url: URL, revision: str = "base") -> None:
    """Take the tables back to an older `revision`; data may be lost."""
    _run(url, command.downgrade, revision)


def _run(url: URL, operation: Operation, revision: str) -> None:
    # SQLite changes a table by copying it and dropping the old one. With foreign keys the drop
    # would delete rows of other tables; they can only be turned off outside a transaction.
    engine = open_engine(url, pool=NullPool, foreign_keys=False, limited=False)
    while True:
        try:
            with translated_errors(), engine.connect() as plain:
                if plain.dialect.name == "postgresql":
                    _change_postgres(plain, operation, revision)
                else:
                    # The write lock of BEGIN IMMEDIATE keeps the second process out.
                    connection = plain.execution_options(nightjar_write=True)
                    with connection.begin():
                        _change(connection, operation, revision)
        except StoreUnavailableError as error:
            driver_error = getattr(error.__cause__, "orig", None)
            if getattr(driver_error, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
                raise
            logger.warning("tables are in use; trying again", extra={"action": "migrate_waits"})
            time.sleep(_RETRY_S)
        else:
            return


def _change_postgres(connection: Connection, operation: Operation, revision: str) -> None:
    """Change the tables under a lock of the session, which ends with it.

    It polls for the lock. A statement that waits would hold a snapshot, and an index that the
    first process builds would wait for that snapshot.

    Raises:
        NoSessionError: A pooler answers.
    """
    from nightjar.jobs.store import postgres  # noqa: PLC0415 - psycopg is an extra

    driver: Any = connection.connection.driver_connection
    if not postgres.is_direct(driver):
        raise NoSessionError("a migration")
    locked = text("SELECT pg_try_advisory_lock(:key)")
    while not connection.scalar(locked, {"key": _MIGRATION_LOCK}):
        connection.rollback()
        time.sleep(_LOCK_LOOK_S)
    connection.commit()
    try:
        connection.execute(text(f"SET lock_timeout = {LOCK_TIMEOUT_MS}"))
        connection.commit()
        _change(connection, operation, revision)
        connection.commit()
    finally:
        connection.rollback()
        connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _MIGRATION_LOCK})
        connection.commit()


def _change(connection: Connection, operation: Operation, revision: str) -> None:
    config = alembic_config()
    config.attributes["connection"] = connection
    operation(config, revision)
