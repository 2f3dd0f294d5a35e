"""Fixtures for every test.

`pytest -m gpu` also runs where only torch, CuPy, NumPy, tokenizers, safetensors, transformers and
pytest are installed.
"""

import gc
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import Decoder, KVTensors, TokenBatch, load_model
from tests.backends import choose_compiler
from tests.bare_machine import GPU_FOLDERS, asks_for_gpu_alone
from tests.combinations import mark_all_but_a_sample, mark_all_but_one
from tests.models import save_gpt2

HAS_DATABASES = find_spec("sqlalchemy") is not None

DATABASE_KINDS = ("sqlite", "postgresql")

BITWISE_PRECISIONS = ("fp32", "bf16")
"""Their results are the same to the last bit, whatever else is computed."""

SQL_FILES = ("test_store_", "test_tables_", "test_migrations")
"""Beginnings of the names of files whose tests are about SQL itself; see the mark one_database."""

SYSTEM_FOLDERS = ("acceptance", "faults", "integration")
"""Their tests wait for processes most of the time."""

# Importing and collecting make hundreds of thousands of objects that stay: to look through them for
# garbage again and again takes a tenth of the time.
gc.disable()

# Kernels and engine need no database: without SQLAlchemy a test that asks for one is an error.
pytest_plugins = ["tests.databases", "tests.examples_without_deadline"] if HAS_DATABASES else []


def has_timeouts(plugins: pytest.PytestPluginManager) -> bool:
    """Whether pytest-timeout is loaded, by itself or by its module's name."""
    return plugins.hasplugin("timeout") or plugins.hasplugin("pytest_timeout")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Define pytest-timeout's option where it is not loaded: pyproject.toml sets it."""
    if not has_timeouts(pluginmanager):
        parser.addini("timeout", "seconds that a test may take (needs pytest-timeout)")


def pytest_configure(config: pytest.Config) -> None:
    """Define pytest-timeout's marker where it is not loaded.

    A bare GPU machine has its own versions of the packages. Their warnings do not fail a test.
    """
    # Most models of tests are random: no start could call them sound.
    os.environ.setdefault("NIGHTJAR_VERIFY", "off")
    if not has_timeouts(config.pluginmanager):
        config.addinivalue_line("markers", "timeout(seconds): needs pytest-timeout")
    if asks_for_gpu_alone(config.option.markexpr):
        config.addinivalue_line("filterwarnings", "default")
    else:
        choose_compiler()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Let `-m gpu` collect only the folders that hold such tests.

    The others import packages that a bare GPU machine lacks (tests/unit/test_bare_machine.py).
    """
    folder = collection_path.relative_to(Path(__file__).parent).parts[:1]
    elsewhere = bool(folder) and folder[0] not in GPU_FOLDERS
    return True if elsewhere and asks_for_gpu_alone(config.option.markexpr) else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Stop with one error where only the tests of a GPU are asked for and there is none."""
    gc.freeze()  # what is garbage by now is little, and to look for it takes a second
    gc.enable()
    option = session.config.option
    if not asks_for_gpu_alone(option.markexpr) or option.collectonly:
        return
    if session.items and not torch.cuda.is_available():
        raise pytest.UsageError(f"torch sees no CUDA device: {len(session.items)} tests need one")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests of a GPU where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let warnings pass in the tests of a GPU, and order the files where several run at a time.

    Of what is `sampled`, `make test` runs a few cases. What stands above the store does the same on
    both databases: there it runs each test on one of them. So it does with `any_model`.
    """
    short = [item for item in items if not item.get_closest_marker("slow")]
    mark_all_but_a_sample(item for item in short if item.get_closest_marker("sampled"))
    alike = [item for item in items if not item.path.name.startswith(SQL_FILES)]
    alike += [item for item in items if item.get_closest_marker("one_database")]
    mark_all_but_one(alike, DATABASE_KINDS)
    mark_all_but_one(items, BITWISE_PRECISIONS, "any_model")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))
    if hasattr(config, "workerinput"):
        mix_files(items)


def mix_files(items: list[pytest.Item]) -> None:
    """Spread the files of whole systems over the others, so that waiting and computing overlap.

    The last tenth is left to the others: their files are short, and no worker is idle for long.
    """
    files = dict.fromkeys(item.path for item in items)
    systems = [path for path in files if path.parent.name in SYSTEM_FOLDERS]
    others = [path for path in files if path.parent.name not in SYSTEM_FOLDERS]
    place = {path: 0.9 * i / len(systems) for i, path in enumerate(systems)}
    place |= {path: i / len(others) for i, path in enumerate(others)}
    items.sort(key=lambda item: place[item.path])


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


@pytest.fixture(scope="session", params=BITWISE_PRECISIONS)
def any_model(request: pytest.FixtureRequest, directory: ModelDirectory) -> Decoder:
    """The tiny model in each precision of BITWISE_PRECISIONS."""
    return load_model(directory, request.param)


@pytest.fixture(scope="session")
def token_bytes(directory: ModelDirectory) -> Sequence[bytes]:
    """The raw bytes of the tiny model's tokens."""
    return directory.tokenizer().token_bytes


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Compute on one thread: a second one does not speed such small products up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every forward pass from now on."""
    found: list[int] = []
    forward = Decoder.forward

    def counted(model: Decoder, batch: TokenBatch, cache: KVTensors) -> torch.Tensor:
        found.append(len(batch.token_ids))
        return forward(model, batch, cache)

    monkeypatch.setattr(Decoder, "forward", counted)
    return found
