"""Attention computed plainly, and problems for the CPU kernels."""

import torch

from nightjar import kernels


def naive(q, k, v, scale, mask):
    """Attention of one sequence in float64: q [Lq, H, D], k and v [Lk, Hkv, D]."""
    repeat = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T


def causal(length, prefix=0):
    return torch.ones(length, prefix + length, dtype=torch.bool).tril(prefix)


def random_qkv(rows, heads, seed=0, dtype=torch.float32):
    n_heads, kv_heads, size = heads
    generator = torch.Generator().manual_seed(seed)
    # Slices of one wide tensor, as a fused projection gives them: not contiguous.
    wide = torch.randn(rows, n_heads + 2 * kv_heads, size, generator=generator).to(dtype)
    return wide.split([n_heads, kv_heads, kv_heads], dim=1)


def filled_cache(k, v, lengths, tables, block_size, blocks, poison=float("nan"), *, dtype=None):
    """Return a cache that holds these packed rows; all other numbers are `poison`."""
    shape = (blocks, k.shape[1], block_size, k.shape[2])
    keys, values = (torch.full(shape, poison, dtype=dtype or k.dtype) for _ in range(2))
    row_blocks, offsets = [], []
    for table, length in zip(tables, lengths, strict=True):
        row_blocks += [table[p // block_size] for p in range(length)]
        offsets += [p % block_size for p in range(length)]
    kernels.kv_write(keys, values, k, v, torch.tensor(row_blocks), torch.tensor(offsets))
    return keys, values


def tables_for(lengths, block_size):
    """Blocks for sequences of these lengths, in no order, with some to spare."""
    per_sequence = [-(-length // block_size) for length in lengths]
    generator = torch.Generator().manual_seed(5)
    ids = torch.randperm(sum(per_sequence) + 3, generator=generator).tolist()
    return [[ids.pop() for _ in range(count)] for count in per_sequence], sum(per_sequence) + 3
