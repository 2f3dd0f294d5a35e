"""A cache in FP8: its numbers against the definition of e4m3, and attention against float64."""

import numpy as np
import pytest
import torch

from nightjar import kernels
from nightjar.kernels import (
    Branch,
    BranchLayout,
    CacheScales,
    CacheWrite,
    Chunk,
    ChunkLayout,
    HeadNorms,
    PagedLayout,
    Rotation,
    StepRows,
    padded_length,
)
from nightjar.kernels.reference import fp8_rows
from tests import fp8
from tests.backends import BACKENDS, use_backend
from tests.cpu_attention import causal, naive, random_qkv, tables_for

HEADS = [(4, 4, 8), (3, 3, 37), (4, 2, 16), (6, 2, 80), (8, 1, 128)]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of attention to the same numbers: what the dtype of the rows rounds off."""


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


def some_rows(dtype=torch.float32):
    """Rows of every size: common ones, zeros, the edges of a scale, tiny and huge numbers."""
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(40, 16, generator=generator)
    spread = torch.randn(40, 16, generator=generator) * 2.0 ** torch.randint(
        -12, 13, (40, 16), generator=generator
    )
    edges = torch.zeros(8, 16)
    edges[:, 0] = torch.tensor([0.0, 448.0, 448.5, 449.0, 224.0, 1.75, 1.7500001, -447.0])
    edges[:, 1:4] = torch.tensor([0.25, 0.0009765625, -0.0029296875])  # subnormals, and ties
    found = [common, spread, edges]
    if dtype != torch.float16:
        found += [common * 1e30, common * 1e-30, common * 1e-44, common * 9e37]
    return torch.cat(found).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_codes_and_exponents_are_those_of_the_definition(dtype):
    rows = some_rows(dtype)
    codes, exponents = fp8_rows.quantised(rows)
    for row, code, exponent in zip(rows, codes, exponents, strict=True):
        expected, expected_exponent = fp8.quantised(row.float().double().numpy())
        assert exponent.item() == expected_exponent, row
        np.testing.assert_array_equal(code.numpy(), expected, err_msg=str(row))


def test_numbers_differ_by_no_more_than_half_a_step():
    rows = some_rows()
    codes, exponents = fp8_rows.quantised(rows)
    found, exact = fp8_rows.dequantised(codes, exponents, torch.float64), rows.double()
    factors = 2.0 ** (exponents.double().unsqueeze(-1) - 127)
    bound = torch.maximum(exact.abs() * 2**-4, factors * 2**-10)
    assert ((found - exact).abs() <= bound).all()
    assert torch.equal(found, fp8.numbers(codes.numpy(), exponents.numpy()))
    # The scale is no larger than it must be: half of it would not hold the row.
    peaks = exact.abs().amax(-1)
    assert ((peaks > 224 * factors[:, 0]) | (exponents == 1)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_are_the_same_in_every_dtype(dtype):
    codes, exponents = fp8_rows.quantised(torch.randn(200, 64))
    exact = fp8_rows.dequantised(codes, exponents, torch.float64)
    assert torch.equal(fp8_rows.dequantised(codes, exponents, dtype).double(), exact)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_nan_throughout(wrong):
    rows = torch.randn(3, 16)
    rows[1, 5] = wrong
    found = fp8_rows.dequantised(*fp8_rows.quantised(rows), torch.float32)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_a_cleared_block_holds_zeros():
    empty = torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)
    assert torch.equal(fp8_rows.dequantised(*empty, torch.float32), torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_prefill_attends_to_what_the_cache_keeps(heads, block_size, dtype):
    scale, lengths = heads[2] ** -0.5, [1, 31, 33, 70]
    q, k, v = random_qkv(sum(lengths), heads, dtype=dtype)
    tables, blocks = tables_for(lengths, block_size)
    keys, values, scales = fp8.fp8_cache(k, v, lengths, tables, block_size, blocks)
    chunks = [Chunk(table, 0, n) for table, n in zip(tables, lengths, strict=True)]
    layout = ChunkLayout.build(chunks, block_size)
    out = kernels.prefill_attention(q, keys, values, layout, scale, scales)
    assert out.dtype == dtype
    kept_k, kept_v = fp8.kept(k), fp8.kept(v)
    for rows in _slices(lengths):
        mask = causal(rows.stop - rows.start)
        expected, _ = naive(q[rows], kept_k[rows], kept_v[rows], scale, mask)
        torch.testing.assert_close(
            out[rows].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_decode_attends_to_what_the_cache_keeps(heads, block_size, dtype):
    scale, lengths = heads[2] ** -0.5, [1, 31, 33, 64, 90]
    q, k, v = random_qkv(sum(lengths), heads, dtype=dtype)
    tables, blocks = tables_for(lengths, block_size)
    keys, values, scales = fp8.fp8_cache(k, v, lengths, tables, block_size, blocks)
    ends = torch.tensor(lengths).cumsum(0)
    layout = PagedLayout.build(tables, lengths, block_size)
    out = kernels.decode_attention(q[ends - 1], keys, values, layout, scale, scales)
    assert out.dtype == dtype
    kept_k, kept_v = fp8.kept(k), fp8.kept(v)
    for index, rows in enumerate(_slices(lengths)):
        one = slice(rows.stop - 1, rows.stop)
        every = torch.ones(1, rows.stop - rows.start, dtype=torch.bool)
        expected, _ = naive(q[one], kept_k[rows], kept_v[rows], scale, every)
        torch.testing.assert_close(
            out[index].double(), expected[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("heads", HEADS)
def test_documents_attend_to_what_the_cache_keeps_of_their_query(heads):
    scale = heads[2] ** -0.5
    queries, owners, lengths = [40, 1], [0, 1, 0], [1, 17, 40]
    tables = [[0, 2], [1]]
    _, query_k, query_v = random_qkv(sum(queries), heads, seed=1)
    keys, values, scales = fp8.fp8_cache(query_k, query_v, queries, tables, 32, 3)
    q, k, v = random_qkv(sum(lengths), heads)
    branches = [
        Branch(length, padded_length(length), owner)
        for length, owner in zip(lengths, owners, strict=True)
    ]
    layout = BranchLayout.build(branches, tables, queries)
    out = kernels.branch_attention(q, k, v, keys, values, layout, scale, scales)
    kept_k, kept_v = fp8.kept(query_k), fp8.kept(query_v)
    shared = _slices(queries)
    for owner, rows in zip(owners, _slices(lengths), strict=True):
        # A document's own keys and values are never cached.
        whole_k = torch.cat((kept_k[shared[owner]], k[rows].double()))
        whole_v = torch.cat((kept_v[shared[owner]], v[rows].double()))
        mask = causal(rows.stop - rows.start, queries[owner])
        expected, _ = naive(q[rows], whole_k, whole_v, scale, mask)
        torch.testing.assert_close(out[rows].double(), expected, atol=3e-6, rtol=3e-6)


def test_qkv_post_leaves_in_place_what_the_cache_keeps():
    heads, size, rows, cached = 4, 16, 9, 6
    qkv = torch.randn(rows, heads + 2 * 2, size)
    norms = HeadNorms(torch.rand(size) + 0.5, torch.rand(size) + 0.5, 1e-6)
    angles = torch.randn(20, size // 2)
    rotation = Rotation(angles.cos(), angles.sin(), torch.arange(rows))
    written = torch.arange(cached) % 3, torch.arange(cached) // 3

    def post(dtype, scales):
        found = qkv.clone()
        cache = (torch.zeros(3, 2, 4, size, dtype=dtype) for _ in range(2))
        write = CacheWrite(*cache, *written, scales)
        kernels.qkv_post(found, norms, rotation, write)
        return found, write

    plain, _ = post(torch.float32, None)
    empty = CacheScales(*(torch.zeros(3, 2, 4, dtype=torch.uint8) for _ in range(2)))
    found, write = post(torch.uint8, empty)
    expected = plain.clone()
    expected[:cached, heads:] = fp8.kept(plain[:cached, heads:]).float()
    assert torch.equal(found, expected)
    kept = fp8_rows.dequantised(write.keys, write.scales.keys, torch.float32)
    assert torch.equal(kept[written[0], :, written[1]], expected[:cached, heads : heads + 2])
    kept = fp8_rows.dequantised(write.values, write.scales.values, torch.float32)
    assert torch.equal(kept[written[0], :, written[1]], expected[:cached, heads + 2 :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cut", [1, 31, 32, 50, 69])
def test_how_a_prompt_is_cut_changes_no_bit(cut, dtype):
    """Of a layer as a whole: each part writes its keys and values, then attends."""
    heads, kv_heads, size, length = 4, 2, 16, 70
    qkv = torch.randn(length, heads + 2 * kv_heads, size).to(dtype)
    table = [2, 0, 1]

    def attend(*cuts):
        cache = [torch.zeros(3, kv_heads, 32, size, dtype=torch.uint8) for _ in range(2)]
        scales = CacheScales(*(torch.zeros(3, kv_heads, 32, dtype=torch.uint8) for _ in range(2)))
        outs = []
        for start, end in zip((0, *cuts), (*cuts, length), strict=True):
            positions = torch.arange(start, end)
            places = torch.tensor(table)[positions // 32], positions % 32
            layout = ChunkLayout.build([Chunk(table, start, end)], 32)
            write = CacheWrite(*cache, *places, scales)
            rows = StepRows(layout, None, None)
            outs.append(kernels.attend(qkv[start:end].clone(), None, None, write, rows, 0.25))
        return torch.cat(outs), cache, scales

    whole, cut_up = attend(), attend(cut)
    assert torch.equal(whole[0], cut_up[0])
    for one, other in zip(whole[1], cut_up[1], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(whole[2].keys, cut_up[2].keys)
    assert torch.equal(whole[2].values, cut_up[2].values)


def _slices(lengths):
    ends = np.cumsum(lengths).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
