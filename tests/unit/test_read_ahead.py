"""What is asked for is read ahead, in order, and never more than a few layers."""

import os
import sys
from pathlib import Path

import pytest

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.models.read_ahead import ReadAhead, TensorsAhead
from tests.processes import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes this advice")

Asked = list[tuple[int, int]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Offsets and lengths, as the system was asked."""
    found: Asked = []
    real = os.posix_fadvise

    def advise(file: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        real(file, offset, length, advice)
        found.append((offset, length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return found


def test_ranges_are_asked_for_in_order_and_in_parts(tmp_path: Path, asked: Asked) -> None:
    path, part = tmp_path / "file", 16 << 20
    path.write_bytes(b"abc")
    with ReadAhead() as ahead:
        ahead.ask([(path, 5, 6), (tmp_path / "missing", 0, 9), (path, 10, 20 + part)])
        wait_until("the advice", lambda: len(asked) == 3)
    assert asked == [(5, 1), (10, part), (10 + part, 10)]


def test_a_model_is_read_ahead_once_and_whole(tiny_model: Path, asked: Asked) -> None:
    directory = ModelDirectory.open(tiny_model)
    load_model(directory, "fp32")
    assert len(set(asked)) == len(asked) > 0
    (header,) = directory.headers
    first = 8 + len(header.raw)
    assert all(first <= begin and begin + size <= header.size_bytes for begin, size in asked)


def test_tensors_are_found_by_the_beginning_of_their_names(tiny_model: Path, asked: Asked) -> None:
    directory = ModelDirectory.open(tiny_model)
    (name,) = (name for name in directory.tensors if name.endswith("wte.weight"))
    with ReadAhead() as ahead:
        TensorsAhead(directory, ahead).expect(name.removesuffix("weight"))
        wait_until("the advice", lambda: bool(asked))
    rows, width = directory.tensors[name].shape
    assert [size for _, size in asked] == [rows * width * 4]
