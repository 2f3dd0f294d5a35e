"""Attention of one row a sequence to the paged cache, split over positions: decode_attention.cu.

Bytes of B sequences of L positions, Hkv heads of D channels of s bytes: 2 * B * L * Hkv * D * s of
cache, read once; the parts add 8 D / (SPLIT * 2 D s) of that, 1.6% at D 128, half, SPLIT 128.
Operations: 4 * B * L * Hq * D.  At G = Hq / Hkv <= 8 query heads a KV head that is 2 G / s <= 8
operations a byte, far below what a GPU does: bound by memory.

A block is 128 threads for up to 8 query heads of one KV head over SPLIT positions, so the cache is
read once for all of them.  128 positions are 64 KB of keys and values of 128 half channels: 4
blocks a sequence and head at 512 positions are enough to fill the GPU from 2 sequences on, and
longer splits would save little of the parts.

A thread asks for 8 rows at once, 16 bytes of each (4 where blocks have several query heads, whose
sums take the registers), and for the first values before the softmax: a multiprocessor has 80 KB on
their way, 40 at 4 heads and 32 at 8.  4.8 TB/s over 132 of them, at a latency of 0.7 us, are 25 KB.

Block tables are as wide as the longest text may become, so most splits of most texts hold nothing.
Blocks take several splits each where there would be more of them than fill the GPU a few times.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import INT32_MAX, ceil_div, check, check_storage
from nightjar.kernels.cuda.device import multiprocessors
from nightjar.kernels.cuda.kernel import STORAGE, Kernel
from nightjar.kernels.cuda.launch import launch
from nightjar.kernels.cuda.qkv_post import HEAD_SIZES

THREADS = 128

GROUPS = (1, 4, 8)
"""Query heads of a block.  More than 8 of one KV head are several blocks."""

SPLIT = 128
"""Cached positions whose attention is one partial result.  Splits begin at multiples of it, so that
no row's sums depend on the lengths of others."""

LEAST_ARRIVALS = 1 << 16
"""Sequences times blocks of heads that are counted at once: 256 KB, hardly ever outgrown."""

BLOCKS_PER_MULTIPROCESSOR = 32
"""Where there are more splits, blocks take several.  Six times what is resident (4 or 5), so that
a long text among short ones is still shared out; 4,224 blocks that find nothing, of 132
multiprocessors, take some microseconds."""


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    scale: float,
    lse: Tensor | None = None,
) -> Tensor:
    """One decode step's attention; the lengths are the mask.

    q: [B, Hq, D], rows at any stride; keys, values: [blocks, Hkv, S, D], one layer, S a power of
    two; block_tables: int32[B, W], the blocks of each sequence, W of them at most; lengths:
    int32[B], positions to attend to (0: the row is 0), no more than W * S.
    lse: float32[B, Hq], filled with the log-sum-exp of the scores, for merge_attention.
    Returns [B, Hq, D] in q's dtype.  A row's bits depend on its own sequence alone.
    """
    _check(q, keys, values, block_tables, lengths, lse)
    batch, heads, head_size = q.shape
    kv_heads, block_size = keys.shape[1:3]
    heads_per_kv = heads // kv_heads
    group = next((g for g in GROUPS if g >= heads_per_kv), GROUPS[-1])
    splits = max(1, ceil_div(block_tables.shape[1] * block_size, SPLIT))
    out = torch.empty(batch, heads, head_size, dtype=q.dtype, device=q.device)
    slices = kv_heads * ceil_div(heads_per_kv, group)
    parts = stats = arrived = None
    if splits > 1:
        parts, stats = (
            torch.empty(batch, heads, splits, n, dtype=torch.float32, device=q.device)
            for n in (head_size, 2)
        )
        arrived = _arrivals(q.get_device(), batch * slices)
    most = ceil_div(BLOCKS_PER_MULTIPROCESSOR * multiprocessors(q), max(1, slices * batch))
    launch(
        Kernel.of("decode_attention", "decode_attention", q.dtype, head_size, group, SPLIT),
        (slices, batch, min(splits, most)),
        (THREADS,),
        q,
        np.int64(q.stride(0)),
        keys,
        values,
        block_tables,
        np.int32(block_tables.shape[1]),
        lengths,
        np.int32(splits),
        np.int32(kv_heads),
        np.int32(heads_per_kv),
        np.int32(block_size.bit_length() - 1),
        np.float32(scale),
        out,
        lse,
        parts,
        stats,
        arrived,
    )
    return out


def specialisations() -> Iterator[Kernel]:
    """Every instance that the engine can ask for."""
    for storage in STORAGE:
        for head_size in HEAD_SIZES:
            for group in GROUPS:
                arguments = (storage, head_size, group, SPLIT)
                yield Kernel.of("decode_attention", "decode_attention", *arguments)


def _arrivals(device: int, count: int) -> Tensor:
    """Zeros int32[count at least], which each launch leaves as zeros: on a device one launch runs
    at a time, as all are on one stream."""
    held = _held.setdefault(device, [])
    if not held or held[-1].numel() < count:
        where = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
        held.append(torch.zeros(max(count, LEAST_ARRIVALS), dtype=torch.int32, device=where))
    return held[-1]


_held: dict[int, list[Tensor]] = {}
"""By device; the outgrown ones, too, as recorded graphs have their addresses."""


def _check(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    lse: Tensor | None,
) -> None:
    """See check."""
    check_storage("q", q)
    check("q", q, q.dtype, (None, None, None), strided=True)
    batch, heads, head_size = q.shape
    if head_size not in HEAD_SIZES:
        raise ValueError(f"heads of {head_size} channels: there are kernels for {HEAD_SIZES}")
    if (batch > 1 and q.stride(0) * q.element_size() % 16) or q.data_ptr() % 16:
        raise ValueError("q: every row must begin at a multiple of 16 bytes; copy it first")
    if q.stride(1) != head_size:
        raise ValueError("q: the heads of a row must lie one after another; copy it first")
    check("keys", keys, q.dtype, (None, None, None, head_size), like=q)
    check("values", values, q.dtype, keys.shape, like=q)
    kv_heads, block_size = keys.shape[1:3]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads evenly")
    if block_size & (block_size - 1):
        raise ValueError(f"cache blocks of {block_size} positions: take a power of two")
    if keys.numel() // head_size > INT32_MAX:
        raise ValueError(f"a cache of {keys.numel() // head_size} rows: at most {INT32_MAX}")
    check("block_tables", block_tables, torch.int32, (batch, None), like=q)
    check("lengths", lengths, torch.int32, (batch,), like=q)
    if lse is not None:
        check("lse", lse, torch.float32, (batch, heads), like=q)
