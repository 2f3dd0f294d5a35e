"""What is asked for is read ahead, in order, and never more than a few layers."""

import math
import os
import sys
from pathlib import Path

import pytest

from nightjar.checkpoints import ModelDirectory
from nightjar.checkpoints.disk import ReadAhead
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.models.tensors_ahead import TensorsAhead
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


def test_loading_asks_for_tensors_and_for_none_twice(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the thread comes to them before the small model is loaded is open."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(
        ReadAhead, "ask", lambda _, ranges: found.extend((begin, end) for _, begin, end in ranges)
    )
    directory = ModelDirectory.open(tiny_model)
    load_model(directory, "fp32")
    (header,) = directory.headers
    assert found
    assert set(found) <= set(header.spans().values())
    assert len(set(found)) == len(found)


def test_tensors_are_found_by_the_beginning_of_their_names(tiny_model: Path, asked: Asked) -> None:
    directory = ModelDirectory.open(tiny_model)
    name, other = (
        next(one for one in directory.tensors if one.endswith(end))
        for end in ("wte.weight", "wpe.weight")
    )
    with ReadAhead() as ahead:
        ahead_of = TensorsAhead(directory, ahead)
        for _ in range(2):
            ahead_of.expect(name.removesuffix("weight"))
        ahead_of.expect(other)
        wait_until("the advice", lambda: len(asked) > 1)
    sizes = [4 * math.prod(directory.tensors[one].shape) for one in (name, other)]
    assert [size for _, size in asked] == sizes
