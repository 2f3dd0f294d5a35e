"""Fixtures for every test, and what lets `pytest -m gpu` run where only torch, CuPy, NumPy,
tokenizers, safetensors, transformers and pytest are installed."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import Decoder, load_model
from tests.backends import choose_compiler
from tests.bare_machine import GPU_FOLDERS, asks_for_gpu_alone
from tests.models import save_gpt2

HAS_DATABASES = find_spec("sqlalchemy") is not None
HAS_TIMEOUTS = find_spec("pytest_timeout") is not None

# Kernels and engine need no database: without SQLAlchemy a test that asks for one is an error.
pytest_plugins = ["tests.databases"] if HAS_DATABASES else []


def pytest_addoption(parser: pytest.Parser) -> None:
    """pyproject.toml sets pytest-timeout's option, and an unknown one is an error."""
    if not HAS_TIMEOUTS:
        parser.addini("timeout", "seconds that a test may take (needs pytest-timeout)")


def pytest_configure(config: pytest.Config) -> None:
    """The same for its marker; and a bare GPU machine has the versions that it has: what others
    than the pinned ones warn of, while they are imported too, is no finding of these tests."""
    if not HAS_TIMEOUTS:
        config.addinivalue_line("markers", "timeout(seconds): needs pytest-timeout")
    if asks_for_gpu_alone(config.option.markexpr):
        config.addinivalue_line("filterwarnings", "default")
    else:
        choose_compiler()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` looks into the folders that hold such tests and into no other: those import what a
    bare GPU machine lacks (tests/unit/test_bare_machine.py)."""
    folder = collection_path.relative_to(Path(__file__).parent).parts[:1]
    elsewhere = bool(folder) and folder[0] not in GPU_FOLDERS
    return True if elsewhere and asks_for_gpu_alone(config.option.markexpr) else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Who asks for a GPU's tests alone, where there is none, is told once and not by each test."""
    option = session.config.option
    if not asks_for_gpu_alone(option.markexpr) or option.collectonly:
        return
    if session.items and not torch.cuda.is_available():
        raise pytest.UsageError(f"torch sees no CUDA device: {len(session.items)} tests need one")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Among others a GPU's tests are skipped where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The same where tests of all kinds run on a machine with a GPU."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


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
