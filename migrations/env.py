"""Run by Alembic: gives it the tables and the connection that the store opened."""

from functools import partial

from alembic import context

from nightjar.jobs.store.all_tables import metadata
from nightjar.migrations.parts import is_compared

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("migrations run through nightjar.jobs.store.Store.migrate()")

context.configure(
    connection=connection,
    target_metadata=metadata,
    # SQLite cannot alter most of a table: Alembic copies it instead.
    render_as_batch=connection.dialect.name == "sqlite",
    # Both databases can roll tables back; Alembic only knows it of PostgreSQL.
    transactional_ddl=True,
    # PostgreSQL: a table's lock is held for one revision, and an index is built outside of any.
    # On SQLite the caller's one transaction keeps a second process out.
    transaction_per_migration=connection.dialect.name == "postgresql",
    compare_type=True,
    include_object=partial(is_compared, connection.dialect.name),
)
with context.begin_transaction():
    context.run_migrations()
