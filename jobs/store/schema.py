"""Bringing a database's tables to a revision, by Alembic, without an alembic.ini."""

from collections.abc import Callable

from alembic import command
from alembic.config import Config
from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.pool import NullPool

from nightjar.jobs.store.database import open_engine, translated_errors

# The key of PostgreSQL's advisory lock: one migration at a time.
_MIGRATION_LOCK = 0x6E696768746A6172  # "nightjar"


def alembic_config() -> Config:
    """Alembic's settings; the revisions are found in the package, installed or not."""
    config = Config()
    config.set_main_option("script_location", "nightjar:migrations")
    return config


def migrate(url: URL, revision: str = "head") -> None:
    """Bring the tables to `revision` in one transaction; a second process waits for the first."""
    _run(url, command.upgrade, revision)


def revert(url: URL, revision: str = "base") -> None:
    """Take the tables back to an older `revision`; their data may be lost."""
    _run(url, command.downgrade, revision)


def _run(url: URL, operation: Callable[[Config, str], None], revision: str) -> None:
    # SQLite changes a table by copying it and dropping the old one, which would
    # cascade through foreign keys; they can only be turned off outside a transaction.
    engine = open_engine(url, pool=NullPool, foreign_keys=False)
    config = alembic_config()
    with translated_errors(), engine.connect() as plain:
        # On SQLite the write lock of BEGIN IMMEDIATE keeps the second process out.
        connection = plain.execution_options(nightjar_write=True)
        with connection.begin():
            if connection.dialect.name == "postgresql":
                lock = text("SELECT pg_advisory_xact_lock(:key)")
                connection.execute(lock, {"key": _MIGRATION_LOCK})
            config.attributes["connection"] = connection
            operation(config, revision)
