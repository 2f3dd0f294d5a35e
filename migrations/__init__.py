"""The revisions of the database's tables (Alembic)."""
