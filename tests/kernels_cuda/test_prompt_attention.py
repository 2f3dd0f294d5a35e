"""Prompts and documents over packed sequences, against the torch reference of the CPU."""

import pytest
import torch

from nightjar.kernels import (
    Branch,
    BranchLayout,
    Chunk,
    ChunkLayout,
    cuda,
    kv_write,
    reference,
)
from nightjar.kernels.cuda import prompt_attention, varlen
from nightjar.kernels.cuda.varlen import Packed, varlen_attention
from tests.kernels_cuda.devices import assert_near, random

HEAD, SIZE, SCALE = 64, 4, 0.125


def cache_of(lengths, kv_heads, dtype=torch.float32):
    """Sequences in shuffled blocks; what lies past their ends is zero."""
    counts = [-(-length // SIZE) for length in lengths]
    blocks = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(2)).tolist()
    keys, values = (torch.zeros(sum(counts) + 1, kv_heads, SIZE, HEAD, dtype=dtype) for _ in "kv")
    tables = [[blocks.pop() for _ in range(count)] for count in counts]
    for i, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        places = torch.arange(length)
        k, v = (random((length, kv_heads, HEAD), dtype, seed=7 * i + j) for j in (1, 2))
        kv_write(keys, values, k, v, torch.tensor(table)[places // SIZE], places % SIZE)
    return keys, values, tables


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1)])
def test_chunks_attend_to_everything_up_to_themselves(device, heads, kv_heads):
    """From the start and from the middle, one row, a whole block; prompts cut into chunks."""
    spans = [(0, 7), (5, 6), (4, 12), (0, 1)]
    keys, values, tables = cache_of([end for _, end in spans], kv_heads)
    chunks = [Chunk(table, *span) for table, span in zip(tables, spans, strict=True)]
    layout = ChunkLayout.build(chunks, SIZE)
    q = random((layout.rows, heads, HEAD), seed=5)
    wanted = reference.prefill.prefill_attention(q, keys, values, layout, SCALE)
    given = [x.to(device) for x in (q, keys, values)]
    assert_near(
        cuda.prompt_attention.prefill_attention(*given, layout, SCALE),
        wanted,
        ulps=32,
        absolute=1e-5,
    )


@pytest.mark.parametrize("spans", [[(0, 7), (0, 1), (0, 12)], [(0, 7), (3, 4), (0, 12)]], ids=str)
def test_prompts_that_are_whole_are_read_where_they_are(device, spans, monkeypatch):
    """And only those: what was cached earlier is nowhere else."""
    keys, values, tables = cache_of([end for _, end in spans], 2)
    chunks = [Chunk(table, *span) for table, span in zip(tables, spans, strict=True)]
    layout = ChunkLayout.build(chunks, SIZE)
    q = random((layout.rows, 4, HEAD), seed=5)
    own = tuple(
        torch.cat(
            [
                torch.stack([x[table[i // SIZE], :, i % SIZE] for i in range(*span)])
                for table, span in zip(tables, spans, strict=True)
            ]
        )
        for x in (keys, values)
    )
    given = [x.to(device) for x in (q, keys, values)]
    gathered = cuda.prompt_attention.prefill_attention(*given, layout, SCALE)
    paged, run = [], prompt_attention.paged_prefill

    def counted(*args, **also):
        paged.append(args)
        return run(*args, **also)

    monkeypatch.setattr(prompt_attention, "paged_prefill", counted)
    packed = torch.cat((q, *own), dim=1).to(device)  # as a projection leaves them
    there = packed.split([4, 2, 2], dim=1)
    found = cuda.prompt_attention.prefill_attention(
        there[0], *given[1:], layout, SCALE, own=there[1:]
    )
    # Not equal to the last bit: cuBLAS may take another kernel for rows at another stride.
    assert_near(found, gathered.cpu().double(), ulps=32, absolute=1e-5)
    assert len(paged) == (1 if any(start for start, _ in spans) else 0)
    paged.clear()
    halves = tuple(x.half().to(device) for x in own)  # not what the cache holds
    assert torch.equal(
        cuda.prompt_attention.prefill_attention(*given, layout, SCALE, own=halves), gathered
    )
    assert len(paged) == 1


def test_a_prompt_in_chunks_is_the_prompt_whole(device):
    keys, values, (table,) = cache_of([14], 1)
    q = random((14, 2, HEAD), seed=5).to(device)
    cached = keys.to(device), values.to(device)
    whole = ChunkLayout.build([Chunk(table, 0, 14)], SIZE)
    wanted = cuda.prompt_attention.prefill_attention(q, *cached, whole, SCALE).cpu()
    for cut in (1, 4, 9, 13):
        parts = [
            cuda.prompt_attention.prefill_attention(
                q[start:end], *cached, ChunkLayout.build([Chunk(table, start, end)], SIZE), SCALE
            )
            for start, end in ((0, cut), (cut, 14))
        ]
        assert_near(torch.cat(parts), wanted, ulps=32, absolute=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
def test_documents_of_several_prefixes_in_any_order(device, heads, kv_heads):
    """The prefixes are read in the pages of the cache."""
    keys, values, tables = cache_of([9, 4, 1], kv_heads)
    lengths, prefixes = [3, 1, 5, 2, 4], [1, 0, 2, 0, 1]
    branches = [Branch(n, 16, prefix) for n, prefix in zip(lengths, prefixes, strict=True)]
    layout = BranchLayout.build(branches, tables, [9, 4, 1])
    rows = sum(lengths)
    q = random((rows, heads, HEAD), seed=3)
    k, v = (random((rows, kv_heads, HEAD), seed=seed) for seed in (8, 9))
    wanted = reference.branch.branch_attention(q, k, v, keys, values, layout, SCALE)
    given = [x.to(device) for x in (q, k, v, keys, values)]
    assert_near(
        cuda.prompt_attention.branch_attention(*given, layout, SCALE),
        wanted,
        ulps=32,
        absolute=1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_chunks_and_documents_in_16_bits(device, dtype):
    """Several prompts in chunks, and documents after cached prefixes, as the reference in FP32."""
    keys, values, tables = cache_of([33, 6, 70], 2, dtype)
    spans = [(30, 33), (0, 6), (1, 70)]
    chunks = [Chunk(table, *span) for table, span in zip(tables, spans, strict=True)]
    of_chunks = ChunkLayout.build(chunks, SIZE)
    of_documents = BranchLayout.build([Branch(2, 16, 2), Branch(9, 16, 0)], tables, [33, 6, 70])
    q = random((of_chunks.rows, 4, HEAD), dtype, seed=5)
    k, v = (random((11, 2, HEAD), dtype, seed=seed) for seed in (8, 9))
    given = [q, keys, values, of_chunks, SCALE]
    documents = [q[:11], k, v, keys, values, of_documents, SCALE]

    def moved(arguments, move):
        return [move(x) if isinstance(x, torch.Tensor) else x for x in arguments]

    for run, by, arguments in (
        (cuda.prompt_attention.prefill_attention, reference.prefill.prefill_attention, given),
        (cuda.prompt_attention.branch_attention, reference.branch.branch_attention, documents),
    ):
        found = run(*moved(arguments, lambda x: x.to(device)))
        wanted = by(*moved(arguments, torch.Tensor.float))
        assert_near(found, wanted, ulps=4, absolute=4e-3 if dtype is torch.float16 else 3e-2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_packed_sequences_and_their_log_sum_exp(device, causal, dtype):
    """Against the formula in float64; fewer rows than keys, one of each, grouped heads."""
    rows, keys = [3, 1, 5, 1], [3, 1, 40, 17]
    q = random((sum(rows), 4, HEAD), dtype, seed=1)
    k, v = (random((sum(keys), 2, HEAD), dtype, seed=seed) for seed in (2, 3))
    outs, lses = [], []
    parts = zip(q.split(rows), k.split(keys), v.split(keys), strict=True)
    for one_q, one_k, one_v in parts:
        wide_k, wide_v = (x.double().repeat_interleave(2, 1) for x in (one_k, one_v))
        scores = torch.einsum("qhd,khd->hqk", one_q.double(), wide_k) * SCALE
        if causal:
            seen = torch.ones(scores.shape[1:]).tril(scores.shape[2] - scores.shape[1]).bool()
            scores.masked_fill_(~seen, float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_v))
        lses.append(scores.logsumexp(-1).t())
    packed = [Packed.of(lengths, torch.device(device)) for lengths in (rows, keys)]
    given = [x.to(device) for x in (q, k, v)]
    out, lse = varlen_attention(*given, *packed, SCALE, causal=causal)
    assert_near(out, torch.cat(outs), ulps=16, absolute=2e-3 if dtype != torch.float32 else 1e-5)
    assert_near(lse, torch.cat(lses), ulps=64, absolute=1e-3)


def test_rows_beyond_one_plain_product(device, monkeypatch):
    """The mask goes on where a sequence is computed in pieces."""
    packed = Packed.of([7], torch.device(device)), Packed.of([9], torch.device(device))
    given = [random((n, 2, HEAD), seed=n).to(device) for n in (7, 9, 9)]
    wanted, wanted_lse = varlen_attention(*given, *packed, SCALE, causal=True)
    monkeypatch.setattr(varlen, "PLAIN_ROWS", 3)
    out, lse = varlen_attention(*given, *packed, SCALE, causal=True)
    assert_near(out, wanted.cpu(), ulps=32, absolute=1e-5)
    assert_near(lse, wanted_lse.cpu(), ulps=32, absolute=1e-5)
