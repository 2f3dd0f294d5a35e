"""Opens the database that the settings name."""

from nightjar.jobs.store import Store
from nightjar.pipeline.settings import Settings


def open_store(settings: Settings, *, connections: int | None = None) -> Store:
    """Open the store of a deployment; it connects at the first use.

    Args:
        settings: They name the database, and where a pooler stands before it, the server itself.
        connections: The most that are open to PostgreSQL at a time, as `Database` has it.

    Raises:
        UnusableDatabaseError: A URL cannot be used.
    """
    direct = settings.database_direct_url
    return Store(
        settings.database_url.get_secret_value(),
        connections=connections,
        direct_url=None if direct is None else direct.get_secret_value(),
        packs_answers=settings.pack_answers,
    )
