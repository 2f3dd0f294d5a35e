"""Tensors are put together from the rows of stored arrays, and their sources are read ahead."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nightjar.checkpoints.convert.arrays import (
    BLOCK_BYTES,
    Recipe,
    StoredArray,
    columns_in_order,
    rows_in_order,
)
from nightjar.checkpoints.convert.writing import Writer, plan_files
from tests.megatron_models import gpt2, save_whole_tokenizer
from tests.megatron_writer import Layout, write_checkpoint

WITHOUT_TORCH = """
import sys
from nightjar.pipeline.front.cli import app
app(["convert", *sys.argv[1:]], standalone_mode=False)
assert "torch" not in sys.modules
"""


def stored(path: Path, numbers: np.ndarray) -> StoredArray:
    """Write numbers, after some bytes that do not belong to them."""
    path.write_bytes(bytes(24) + numbers.tobytes())
    dtype = {"float16": "F16", "float32": "F32"}[numbers.dtype.name]
    strides = tuple(step // numbers.itemsize for step in numbers.strides)
    return StoredArray(path, 24, dtype, numbers.shape, strides, path.name)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("shape", [(700, 1100), (257, 40), (3, BLOCK_BYTES), (256, 512)])
def test_matrices_of_several_blocks_and_tiles_are_transposed(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    whole = random(*shape)
    half = shape[1] // 2
    parts = [
        stored(tmp_path / name, np.ascontiguousarray(part))
        for name, part in (("a", whole[:, :half]), ("b", whole[:, half:]))
    ]
    pieces = columns_in_order(parts)
    made = Recipe("t", "F16", shape[::-1], pieces, transposed=True).build()
    np.testing.assert_array_equal(made, whole.T)
    wide = Recipe("t", "F32", shape, pieces).build()
    np.testing.assert_array_equal(wide, whole.astype(np.float32))


def test_an_array_that_is_stored_by_columns(tmp_path: Path) -> None:
    whole = random(300, 900)
    array = stored(tmp_path / "a", np.ascontiguousarray(whole.T))
    array = StoredArray(array.path, 24, "F16", (300, 900), (1, 300), "by columns")
    made = Recipe("t", "F16", (300, 900), rows_in_order([array])).build()
    np.testing.assert_array_equal(made, whole)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes this advice")
def test_every_source_is_read_ahead_once_and_written_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: dict[int, list[tuple[int, int]]] = {}
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _, *span: advised.setdefault(span[2], []).append(span[:2])
    )
    arrays = [stored(tmp_path / f"{n}", random(600, 50 + n)) for n in range(4)]
    recipes = [
        Recipe(f"{array.label}-{twice}", "F16", array.shape, rows_in_order([array]))
        for array in arrays
        for twice in range(2)
    ]
    files = plan_files(recipes)
    writer = Writer(tmp_path / "out", {})
    for file in files:
        writer.write_file(file, lambda _: None)
    sizes = [600 * 2 * (50 + n) for n in range(4)]
    (written,) = (tmp_path / "out").glob("*.safetensors")
    ahead, early = advised[os.POSIX_FADV_WILLNEED], advised[os.POSIX_FADV_DONTNEED]
    assert set(ahead) <= {(24, size) for size in sizes}
    assert len(set(ahead)) == len(ahead)
    assert sum(size for _, size in early) == 2 * sum(sizes)
    assert sum(early[-1]) == written.stat().st_size


def test_the_command_loads_no_torch(tmp_path: Path) -> None:
    source = write_checkpoint(gpt2(), tmp_path / "checkpoint", Layout(tp=2))
    (tmp_path / "tokenizer").mkdir()
    tokenizer = save_whole_tokenizer(tmp_path / "tokenizer")
    options = ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "model")]
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, str(source), *options], check=True)
    assert (tmp_path / "model" / "model.safetensors").is_file()
