"""The API as `nightjar api` makes it."""

from fastapi import FastAPI

from nightjar.jobs.api.key_ring import Access
from nightjar.jobs.store import Store
from nightjar.pipeline.front.api_server import _celery, application
from nightjar.pipeline.settings import Settings


def real_app(store: Store) -> FastAPI:
    """As `nightjar api` makes it; nobody is at the broker."""
    settings = Settings(models="demo=models/demo", broker_url="redis://127.0.0.1:1/0")
    return application(settings, store, _celery(settings), Access())
