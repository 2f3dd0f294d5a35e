"""Fixtures for every test."""

from pathlib import Path

import pytest

from tests.databases import (  # noqa: F401
    database_url,
    migrated_sqlite_file,
    postgres_server,
    postgres_url,
    sqlite_url,
    store,
)
from tests.models import save_gpt2


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random model directory: 2 layers, width 32, vocabulary 512, context 128."""
    return save_gpt2(tmp_path_factory.mktemp("models") / "tiny")
