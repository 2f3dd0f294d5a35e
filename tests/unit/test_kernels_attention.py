"""Attention ops against a float64 oracle, over awkward shapes, and their independence; each by the
torch reference and by the compiled kernels."""

import pytest
import torch

from nightjar import kernels
from nightjar.kernels import (
    Branch,
    BranchLayout,
    Chunk,
    ChunkLayout,
    PagedLayout,
    padded_length,
)
from tests.backends import BACKENDS, use_backend
from tests.cpu_attention import causal, filled_cache, naive, random_qkv, tables_for

HEADS = [(4, 4, 8), (3, 3, 37), (4, 2, 16), (2, 2, 64), (6, 2, 80), (8, 1, 128)]


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_prefill_equals_naive_attention(heads, block_size):
    scale = heads[2] ** -0.5
    lengths = [1, 31, 32, 33, 130, 3]
    q, k, v = random_qkv(sum(lengths), heads)
    tables, blocks = tables_for(lengths, block_size)
    cache = filled_cache(k, v, lengths, tables, block_size, blocks, poison=0.0)
    chunks = [Chunk(table, 0, n) for table, n in zip(tables, lengths, strict=True)]
    out = kernels.prefill_attention(q, *cache, ChunkLayout.build(chunks, block_size), scale)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        expected, _ = naive(q[rows], k[rows], v[rows], scale, causal(length))
        torch.testing.assert_close(out[rows].double(), expected, atol=3e-6, rtol=3e-6)
        start += length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
def test_how_a_prompt_is_cut_changes_no_bit(heads, dtype):
    """Nor does the company in which a chunk is computed."""
    length, other = 150, 70
    q, k, v = random_qkv(length + other, heads, dtype=dtype)
    tables, blocks = tables_for([length, other], 32)
    cache = filled_cache(k, v, [length, other], tables, 32, blocks, poison=0.0)

    def attend(rows, *chunks):
        parts = [Chunk(tables[i], start, end) for i, start, end in chunks]
        return kernels.prefill_attention(q[rows], *cache, ChunkLayout.build(parts, 32), 0.25)

    whole = attend(slice(0, length), (0, 0, length))
    for cut in (1, 31, 32, 33, 64, 100, 149):
        first = attend(slice(0, cut), (0, 0, cut))
        rest = attend(slice(cut, length + other), (0, cut, length), (1, 0, other))
        assert torch.equal(torch.cat((first, rest[: length - cut])), whole)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_decode_equals_naive_attention(heads, block_size):
    scale = heads[2] ** -0.5
    lengths = [1, 31, 32, 33, 64, 5, 90]
    tables, blocks = tables_for(lengths, block_size)
    q, k, v = random_qkv(sum(lengths), heads)
    # Zeros, not NaN: a masked key's weight is 0, and 0 times NaN would still be NaN.
    cache = filled_cache(k, v, lengths, tables, block_size, blocks, poison=0.0)
    ends = torch.tensor(lengths).cumsum(0)
    layout = PagedLayout.build(tables, lengths, block_size)
    out = kernels.decode_attention(q[ends - 1], *cache, layout, scale)
    for index, (end, length) in enumerate(zip(ends.tolist(), lengths, strict=True)):
        rows = slice(end - length, end)
        expected, _ = naive(q[rows], k[rows], v[rows], scale, causal(length))
        torch.testing.assert_close(out[index].double(), expected[-1], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("heads", HEADS)
def test_branch_equals_naive_attention_over_query_and_document(heads):
    scale = heads[2] ** -0.5
    queries, owners = [40, 1, 33], [0, 2, 1, 0, 2, 2, 0]
    lengths = [1, 16, 17, 5, 2, 60, 8]
    tables = [[0, 2], [5], [4, 1]]
    _, query_k, query_v = random_qkv(sum(queries), heads, seed=1)
    cache = filled_cache(query_k, query_v, queries, tables, 32, 6)
    q, k, v = random_qkv(sum(lengths), heads)
    branches = [
        Branch(length, padded_length(length), owner)
        for length, owner in zip(lengths, owners, strict=True)
    ]
    layout = BranchLayout.build(branches, tables, queries)
    out = kernels.branch_attention(q, k, v, *cache, layout, scale)
    query_starts = torch.tensor([0, *queries]).cumsum(0).tolist()
    start = 0
    for length, owner in zip(lengths, owners, strict=True):
        rows = slice(start, start + length)
        shared = slice(query_starts[owner], query_starts[owner + 1])
        keys = torch.cat((query_k[shared], k[rows]))
        values = torch.cat((query_v[shared], v[rows]))
        expected, _ = naive(q[rows], keys, values, scale, causal(length, queries[owner]))
        torch.testing.assert_close(out[rows].double(), expected, atol=3e-6, rtol=3e-6)
        start += length


def test_merge_equals_attention_over_the_union():
    q, k, v = random_qkv(50, (2, 2, 16))
    every = torch.ones(50, 50, dtype=torch.bool)
    whole, _ = naive(q, k, v, 0.5, every)
    first = (x.float() for x in naive(q, k[:13], v[:13], 0.5, every[:, :13]))
    second = (x.float() for x in naive(q, k[13:], v[13:], 0.5, every[:, 13:]))
    merged = kernels.merge_attention(*first, *second)
    torch.testing.assert_close(merged.double(), whole, atol=1e-6, rtol=1e-6)


def test_merge_with_a_side_that_weighs_nothing():
    out = torch.randn(3, 2, 4)
    far = torch.full((3, 2), -1e30)
    assert torch.equal(kernels.merge_attention(out, far * 0, -out, far), out)
    assert torch.equal(kernels.merge_attention(-out, far, out, far * 0), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_a_sequence_does_not_feel_its_neighbours(dtype, seed):
    """Bitwise: alone, or in any company and order."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 200, (9,), generator=generator).tolist()
    q, k, v = random_qkv(sum(lengths), (4, 4, 16), seed, dtype)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    tables = [list(range(8 * i, 8 * i + 8)) for i in range(len(lengths))]
    cache = filled_cache(k, v, lengths, tables, 32, 72, poison=0.0)
    chunks = [Chunk(table, 0, n) for table, n in zip(tables, lengths, strict=True)]
    together = kernels.prefill_attention(q, *cache, ChunkLayout.build(chunks, 32), 0.25)
    ends = [start + length - 1 for start, length in zip(starts, lengths, strict=False)]
    layout = PagedLayout.build(tables, lengths, 32)
    decoded = kernels.decode_attention(q[ends], *cache, layout, 0.25)
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i] + length)
        own = ChunkLayout.build(chunks[i : i + 1], 32)
        assert torch.equal(kernels.prefill_attention(q[rows], *cache, own, 0.25), together[rows])
        single = PagedLayout.build([tables[i]], [length], 32)
        last = kernels.decode_attention(q[ends[i] : ends[i] + 1], *cache, single, 0.25)
        assert torch.equal(last[0], decoded[i])


@pytest.mark.parametrize("depth", [1, 3, 15])
def test_a_shorter_look_at_a_document_changes_no_bit(depth):
    """As long as it is padded by the length of the whole document."""
    _, query_k, query_v = random_qkv(40, (4, 2, 16), seed=1)
    cache = filled_cache(query_k, query_v, [40], [[0, 1]], 32, 2)
    q, k, v = random_qkv(20, (4, 2, 16))
    whole = BranchLayout.build([Branch(20, 32, 0)], [[0, 1]], [40])
    part = BranchLayout.build([Branch(depth, 32, 0)], [[0, 1]], [40])
    expected = kernels.branch_attention(q, k, v, *cache, whole, 0.3)
    rows = slice(0, depth)
    found = kernels.branch_attention(q[rows], k[rows], v[rows], *cache, part, 0.3)
    assert torch.equal(found, expected[rows])


def test_bf16_is_close_to_fp32():
    q, k, v = random_qkv(40, (4, 4, 16))
    layout = ChunkLayout.build([Chunk([0, 1], 0, 40)], 32)
    exact, rounded = (
        kernels.prefill_attention(
            q.to(dtype),
            *filled_cache(k.to(dtype), v.to(dtype), [40], [[0, 1]], 32, 2, poison=0.0),
            layout,
            0.25,
        )
        for dtype in (torch.float32, torch.bfloat16)
    )
    torch.testing.assert_close(rounded.float(), exact, atol=3e-2, rtol=3e-2)


def test_scores_of_any_size_stay_finite_and_nan_is_kept():
    q, k, v = random_qkv(40, (2, 2, 32))
    q = q * 1e4
    q[7, 1, 3] = float("nan")
    cache = filled_cache(k, v, [40], [[0, 1]], 32, 2, poison=0.0)
    layout = ChunkLayout.build([Chunk([0, 1], 0, 40)], 32)
    out = kernels.prefill_attention(q, *cache, layout, 1.0)
    assert out[7, 1].isnan().all()
    out[7, 1] = 0.0
    assert out.isfinite().all()
    expected, _ = naive(q[:7], k[:7], v[:7], 1.0, causal(7))
    torch.testing.assert_close(out[:7].double(), expected, atol=1e-2, rtol=1e-2)
    single = PagedLayout.build([[0, 1]], [8], 32)
    decoded = kernels.decode_attention(q[7:8], *cache, single, 1.0)
    assert decoded[0, 1].isnan().all()
    assert decoded[0, 0].isfinite().all()


# Of rows in half precision torch would round every step; kernels.attend widens them before.
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("torch", torch.float32), ("native", torch.float32), ("native", torch.float16)],
    indirect=["backend"],
)
@pytest.mark.parametrize("heads", [(4, 4, 16), (4, 2, 64), (2, 1, 80)])
def test_a_cache_of_halves_gives_the_attention_of_the_rounded_keys(heads, dtype):
    # A unit in the last place of what is kept in half precision.
    near, alike = (3e-6, 2e-6) if dtype == torch.float32 else (1e-3, 1e-3)
    lengths, scale = [33, 5, 64], heads[2] ** -0.5
    q, k, v = random_qkv(sum(lengths), heads, dtype=dtype)
    tables, blocks = tables_for(lengths, 32)
    cache = filled_cache(k, v, lengths, tables, 32, blocks, 0.0, dtype=torch.float16)
    chunks = [Chunk(table, 0, n) for table, n in zip(tables, lengths, strict=True)]
    out = kernels.prefill_attention(q, *cache, ChunkLayout.build(chunks, 32), scale)
    ends = torch.tensor(lengths).cumsum(0)
    layout = PagedLayout.build(tables, lengths, 32)
    decoded = kernels.decode_attention(q[ends - 1], *cache, layout, scale)
    branches = [Branch(n, padded_length(n), 0) for n in lengths]
    after = BranchLayout.build(branches, tables[:1], [33])
    found = kernels.branch_attention(q, k, v, *cache, after, scale)
    assert out.dtype == decoded.dtype == found.dtype == dtype
    rounded_k, rounded_v = k.half().float(), v.half().float()
    prefix = slice(0, 33)
    for end, length in zip(ends.tolist(), lengths, strict=True):
        rows = slice(end - length, end)
        expected, _ = naive(q[rows], rounded_k[rows], rounded_v[rows], scale, causal(length))
        torch.testing.assert_close(out[rows].double(), expected, atol=near, rtol=near)
        torch.testing.assert_close(decoded[ends == end], out[end - 1 : end], atol=alike, rtol=alike)
        keys = torch.cat((rounded_k[prefix], k[rows].float()))
        values = torch.cat((rounded_v[prefix], v[rows].float()))
        expected, _ = naive(q[rows], keys, values, scale, causal(length, 33))
        torch.testing.assert_close(found[rows].double(), expected, atol=near, rtol=near)
