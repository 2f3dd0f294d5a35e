"""What a doctor asks of the database: its revision, its clock, whether there are keys."""

from datetime import datetime

import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from nightjar.jobs.store.database import Database
from nightjar.jobs.store.schema import alembic_config


def head_revision() -> str:
    """The revision of the tables that this version of Nightjar needs."""
    return ScriptDirectory.from_config(alembic_config()).get_current_head() or ""


def found_revision(database: Database) -> str | None:
    """The revision of the tables; None for a database without them. Raises StoreError."""
    with database.reading(probe=True) as connection:
        return MigrationContext.configure(connection).get_current_revision()


def moment_of(database: Database) -> datetime | None:
    """The time by the clock of a database server; None for SQLite, which has none of its own."""
    if database.is_sqlite:
        return None
    with database.reading(probe=True) as connection:
        return connection.scalar(sa.select(sa.func.now()))
