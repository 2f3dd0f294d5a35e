"""What loading reads, keeps and leaves behind."""

import sys
from pathlib import Path

import pytest
import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import load_model
from nightjar.kernels.native import packing
from nightjar.kernels.native.huge_pages import PAGE_BYTES, in_huge_pages
from tests.families import CASES, save_family
from tests.models import Gpt2Shape, save_gpt2

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {name: save_family(folder / name, CASES[name]) for name in ("llama", "polyglot")}
    return made | {"gpt2": save_gpt2(folder / "gpt2", Gpt2Shape())}


@on_linux
@pytest.mark.parametrize("packed_by", ["kernels", "torch"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16", "int8", "fp8"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "polyglot"])
def test_no_weight_stays_in_the_mapped_file(
    family: str,
    dtype: str,
    packed_by: str,
    models: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file may be replaced while the model is in use."""
    if packed_by == "torch":
        monkeypatch.setattr(packing.float_linear, "serves", lambda _: False)
        monkeypatch.setattr(packing.int8_linear, "serves", lambda: False)
    decoder = load_model(ModelDirectory.open(models[family]), dtype)
    assert decoder.weights.layers
    assert str(models[family]) not in Path("/proc/self/maps").read_text(encoding="utf-8")


@on_linux
def test_what_is_stored_as_it_is_computed_is_packed_from_the_file(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only queries, keys and values are put together in a copy."""
    mapped = []
    pack = packing.float_linear.pack

    def seen(weight: torch.Tensor, *rest: object) -> object:
        mapped.append(_file_at(weight.data_ptr()))
        return pack(weight, *rest)

    monkeypatch.setattr(packing.float_linear, "pack", seen)
    decoder = load_model(ModelDirectory.open(models["gpt2"]), "fp32")
    copied = [one for one in mapped if str(models["gpt2"]) not in one]
    assert len(mapped) == 4 * len(decoder.weights.layers) + 1
    assert len(copied) == len(decoder.weights.layers)


@on_linux
def test_huge_pages_are_asked_for_where_one_fits() -> None:
    large, small = (torch.empty(size, dtype=torch.uint8) for size in (3 * PAGE_BYTES, 1000))
    for tensor in (large, small):
        assert in_huge_pages(tensor) is tensor
        tensor.fill_(7)
    middle = large.data_ptr() + PAGE_BYTES + PAGE_BYTES // 2
    assert "hg" in _flags_at(middle)
    assert int(large.sum()) == 7 * large.numel()


def _file_at(address: int) -> str:
    """The line of the mapping that holds this address."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line
    raise LookupError(address)


def _flags_at(address: int) -> list[str]:
    """The VmFlags of the mapping that holds this address."""
    here = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            here = begin <= address < end
        elif here and first == "VmFlags:":
            return line.split()[1:]
    raise LookupError(address)
