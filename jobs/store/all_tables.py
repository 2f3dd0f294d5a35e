"""The metadata with every table in it: each file of tables is imported here, and only for that."""

from nightjar.jobs.store import (
    account_tables,
    batch_tables,
    cache_tables,
    file_tables,
    model_tables,
    schedule_tables,
    session_tables,
    share_tables,
    tables,
    vector_tables,
    webhook_tables,
)
from nightjar.jobs.store.columns import metadata

__all__ = [
    "account_tables",
    "batch_tables",
    "cache_tables",
    "file_tables",
    "metadata",
    "model_tables",
    "schedule_tables",
    "session_tables",
    "share_tables",
    "tables",
    "vector_tables",
    "webhook_tables",
]
