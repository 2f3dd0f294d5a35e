"""Fixtures for every test."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import Decoder, load_model
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


@pytest.fixture(scope="session")
def directory(tiny_model: Path) -> ModelDirectory:
    """The tiny model's directory, opened."""
    return ModelDirectory.open(tiny_model)


@pytest.fixture(scope="session")
def model(directory: ModelDirectory) -> Decoder:
    """The tiny model, loaded."""
    return load_model(directory, "fp32")


@pytest.fixture(scope="session", params=["fp32", "bf16"])
def any_model(request: pytest.FixtureRequest, directory: ModelDirectory) -> Decoder:
    """The tiny model in each precision that results are bitwise the same in."""
    return load_model(directory, request.param)


@pytest.fixture(scope="session")
def token_bytes(directory: ModelDirectory) -> Sequence[bytes]:
    """The raw bytes of the tiny model's tokens."""
    return directory.tokenizer().token_bytes


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Products this small gain nothing from a second thread and wait for it on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
