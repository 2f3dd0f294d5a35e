"""What holds of the compiled kernels alone."""

import numpy as np
import pytest
import torch

from nightjar import kernels
from nightjar.kernels import Chunk, ChunkLayout, PagedLayout, native
from nightjar.kernels.native.tiles import ChunkTiles
from tests.backends import use_backend
from tests.cpu_attention import causal, filled_cache, naive, random_qkv, tables_for


@pytest.fixture(autouse=True)
def _backend(monkeypatch):
    use_backend("native", monkeypatch)


@pytest.mark.parametrize("block_size", [8, 32, 48, 64])
def test_what_nobody_may_see_is_never_read(block_size):
    """Masked keys are not multiplied by 0, as the reference does, but left out."""
    lengths = [1, 31, 47, 100]
    heads = (4, 2, 32)
    q, k, v = random_qkv(sum(lengths), heads)
    tables, blocks = tables_for(lengths, block_size)
    cache = filled_cache(k, v, lengths, tables, block_size, blocks)
    chunks = [Chunk(table, 0, n) for table, n in zip(tables, lengths, strict=True)]
    out = kernels.prefill_attention(q, *cache, ChunkLayout.build(chunks, block_size), 0.3)
    ends = torch.tensor(lengths).cumsum(0)
    layout = PagedLayout.build(tables, lengths, block_size)
    decoded = kernels.decode_attention(q[ends - 1], *cache, layout, 0.3)
    torch.testing.assert_close(decoded, out[ends - 1], atol=2e-6, rtol=2e-6)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        expected, _ = naive(q[rows], k[rows], v[rows], 0.3, causal(length))
        torch.testing.assert_close(out[rows].double(), expected, atol=3e-6, rtol=3e-6)
        start += length


@pytest.mark.parametrize("precision", ["float", "int8"])
def test_the_compiled_products_refuse_other_shapes(precision):
    if precision == "int8" and not native.int8_linear.serves():
        pytest.skip("this processor has no VNNI")
    packed = kernels.pack_linear(torch.ones(5, 8), None, precision)
    with pytest.raises(ValueError, match=r"float32\[2, 9\]: float32 or float16 \[T, 8\]"):
        kernels.linear(torch.ones(2, 9), packed)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        kernels.linear(torch.ones(2, 8, dtype=torch.float64), packed)


def test_numbers_that_are_not_normal_are_zeros_in_a_kernel_and_nowhere_else():
    least = torch.finfo(torch.float32).tiny
    small = torch.full((90, 16), least / 4)
    packed = kernels.pack_linear(torch.eye(16), None)
    assert kernels.linear(small * 4, packed).eq(least).all()
    assert kernels.linear(small, packed).eq(0).all()  # whichever thread computes a row
    assert (small * 2).eq(least / 2).all()


def test_rows_of_a_head_are_those_of_its_vocabulary_and_then_zeros():
    weight = torch.randn(60, 8)
    packed = kernels.pack_linear(weight, None)
    assert native.float_linear.rows(packed, torch.tensor([], dtype=torch.int64)).shape == (0, 8)
    found = native.float_linear.rows(packed, torch.tensor([59, 60, 0, 1000]))
    assert torch.equal(found, torch.stack((weight[59], weight[0] * 0, weight[0], weight[0] * 0)))
    with pytest.raises(IndexError, match="id -1: from 0 on"):
        native.float_linear.rows(packed, torch.tensor([3, -1]))
    with pytest.raises(ValueError, match=r"torch\.int32"):
        native.float_linear.rows(packed, torch.tensor([1], dtype=torch.int32))


@pytest.mark.parametrize("wanted", [[], [40], [0, 34, 35], list(range(3, 75)), list(range(75))])
def test_prompt_rows_that_nobody_wants_are_in_no_tile(wanted):
    parts = [Chunk((4, 1), 5, 40), Chunk((0, 2), 0, 40)]
    layout = ChunkLayout.build(parts, 32)
    tiles = ChunkTiles.holding(layout, np.array(wanted, dtype=np.int64))
    held = [
        (first + i, position + i, start)
        for first, count, position, start in zip(
            tiles.first_rows, tiles.counts, tiles.positions, tiles.table_starts, strict=True
        )
        for i in range(count)
    ]
    assert held == [(row, row + 5, 0) if row < 35 else (row, row - 35, 2) for row in wanted]
