"""Attention of one row a sequence to the paged cache, split over positions: decode_attention.cu.

Bytes of B sequences of L positions, Hkv heads of D channels of s bytes: 2 * B * L * Hkv * D * s of
cache, read once; the parts add 8 D / (SPLIT * 2 D s) of that, 1.6% at D 128, half, SPLIT 128.
Operations: 4 * B * L * Hq * D.  At G = Hq / Hkv <= 8 query heads a KV head that is 2 G / s <= 8
operations a byte, far below what a GPU does: bound by memory.

A block is 128 threads for up to 8 query heads of one KV head over SPLIT positions, so the cache is
read once for all of them.  128 positions are 64 KB of keys and values of 128 half channels: 4
blocks a sequence and head at 512 positions are enough to fill the GPU from 2 sequences on, and
longer splits would save little of the parts.

A thread loads 8 rows at once, 16 bytes of each, and the first values before the softmax.  In FP32,
several query heads leave it 4 rows, because their sums take the registers.  A multiprocessor needs
25 KB in flight: 4.8 TB/s over 132 multiprocessors at a latency of 0.7 us.  It has 80 KB, and 32 KB
at 8 heads in FP32.

What a byte of the cache costs in instructions grows with the query heads that share it.  From 2 on,
16-bit storage is multiplied by tensor cores (decode_tiles.cuh), as FlashInfer does from a group of
4 on.  A warp loads all keys of its 32 positions at once, then all values.  Operands go from the
cache to registers as they lie, so there are no copies to shared memory that could be asynchronous;
128 KB are in flight.

The blocks of a few sequences do not keep memory busy, and each would wait for it four times: twice
for keys, twice for values.  So where all blocks that have a split run at once, each first
prefetches its whole split into the second-level cache (see linear.py).

A decode step's rows come as the QKV projection left them.  Each block finishes its own queries, as
`qkv_post` would.  The block of the newest position also finishes that key and value.  That saves a
launch.

A cache in FP8 has half of the bytes, and a byte for each row of a head: 2 * B * L * Hkv * (D + 1).
What it costs in instructions is a conversion of two numbers at a time (fp8.cuh).

Block tables are as wide as the longest sequence may become, so most splits of most sequences are
empty.  Where there would be far more blocks than fill the GPU, a block takes several splits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import ceil_div, check, check_paged
from nightjar.kernels.cuda.device import multiprocessors
from nightjar.kernels.cuda.kernel import FP8, HEAD_SIZES, STORAGE, Argument, Kernel
from nightjar.kernels.cuda.launch import launch
from nightjar.kernels.cuda.qkv_post import (
    check_heads,
    norm_arguments,
    rotation_arguments,
    scale_arguments,
)
from nightjar.kernels.cuda.switches import current
from nightjar.kernels.heads import CacheScales, CacheWrite, HeadNorms, Rotation

THREADS = 128

GROUPS = (1, 4, 8)
"""Query heads of a block.  More than 8 of one KV head are several blocks."""

MOST_SHARED = GROUPS[-1]
"""Query heads of a KV head that are one block, which may write their newest key and value."""

SPLIT = 128
"""Cached positions whose attention is one partial result.  Splits begin at multiples of it, so that
no row's sums depend on the lengths of others."""

RESIDENT_BLOCKS = 5
"""Blocks that run at once on a multiprocessor, by their registers (4 where key heads are shared).

Each reads 64 KB of keys and values.
"""

LEAST_ARRIVALS = 1 << 16
"""Counters to allocate at first, sequences times blocks of heads: 256 KB, nearly always enough."""

BLOCKS_PER_MULTIPROCESSOR = 32
"""With more splits than this, blocks take several.

It is six times the resident blocks (4 or 5), so that a long sequence among short ones is still
split.  4,224 empty blocks on 132 multiprocessors take some microseconds.
"""


def decode_attention(  # noqa: PLR0913, PLR0917 - rows, cache, layout
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    scale: float,
    lse: Tensor | None = None,
    scales: CacheScales | None = None,
) -> Tensor:
    """One decode step's attention; the lengths are the mask.

    q: [B, Hq, D], rows at any stride; keys, values: [blocks, Hkv, S, D], one layer, S a power of
    two; block_tables: int32[B, W], the blocks of each sequence, W of them at most; lengths:
    int32[B], positions to attend to (0: the row is 0), no more than W * S.
    lse: float32[B, Hq], filled with the log-sum-exp of the scores, for merge_attention; scales: of
    a cache in FP8.
    Returns [B, Hq, D] in q's dtype.  A row's bits depend on its own sequence alone.
    """
    cached = _Cached(keys, values, scales, block_tables, lengths)
    _check(q, cached)
    if lse is not None:
        check("lse", lse, torch.float32, q.shape[:2], like=q)
    finish = (*norm_arguments(None), *rotation_arguments(None), None, None)
    return _launch(q, q.shape[1], finish, cached, scale, lse)


def decode_heads(
    qkv: Tensor,
    norms: HeadNorms | None,
    rotation: Rotation | None,
    cache: CacheWrite,
    block_tables: Tensor,
    lengths: Tensor,
    scale: float,
) -> Tensor:
    """Compute `qkv_post` of running sequences and their attention in one launch; qkv is unchanged.

    qkv: [B, Hq + 2 Hkv, D], packed as query, key, value heads, of which no more than
    MOST_SHARED query heads share a key head; cache: where the newest keys and values go, the last
    of `lengths`; the others as for decode_attention.  Returns [B, Hq, D] in qkv's dtype.
    """
    query_heads = qkv.shape[1] - 2 * cache.keys.shape[1]
    cached = _Cached(cache.keys, cache.values, cache.scales, block_tables, lengths)
    _check(qkv[:, :query_heads], cached)
    kv_heads = check_heads(qkv, query_heads, norms, rotation, cache)
    if query_heads > MOST_SHARED * kv_heads:
        raise ValueError(
            f"{query_heads} query heads share {kv_heads} key heads, which is more than "
            f"{MOST_SHARED} to one: call qkv_post and decode_attention"
        )
    if cache.blocks.shape[0] != qkv.shape[0]:
        raise ValueError(f"{cache.blocks.shape[0]} rows are to be cached of {qkv.shape[0]}")
    written = cache.blocks, cache.offsets
    finish = (*norm_arguments(norms), *rotation_arguments(rotation), *written)
    return _launch(qkv, query_heads, finish, cached, scale, None)


def finishes_heads(query_heads: int, kv_heads: int) -> bool:
    """Whether `decode_heads` computes heads of these numbers.

    At most MOST_SHARED query heads may share a key head, and fused heads must be switched on.
    """
    return current().fused_heads and query_heads <= MOST_SHARED * kv_heads


@dataclass(frozen=True, slots=True)
class _Cached:
    """What is attended to: one layer of the cache, and the sequences in it."""

    keys: Tensor
    values: Tensor
    scales: CacheScales | None
    block_tables: Tensor
    lengths: Tensor


def _launch(
    heads: Tensor,
    query_heads: int,
    finish: tuple[Argument, ...],
    cached: _Cached,
    scale: float,
    lse: Tensor | None,
) -> Tensor:
    """finish: the kernel's arguments for norms, rotation and cache write."""
    keys, block_tables = cached.keys, cached.block_tables
    batch, head_size = heads.shape[0], heads.shape[2]
    kv_heads, block_size = keys.shape[1:3]
    heads_per_kv = query_heads // kv_heads
    group = next((g for g in GROUPS if g >= heads_per_kv), GROUPS[-1])
    splits = max(1, ceil_div(block_tables.shape[1] * block_size, SPLIT))
    out = torch.empty(batch, query_heads, head_size, dtype=heads.dtype, device=heads.device)
    slices = kv_heads * ceil_div(heads_per_kv, group)
    parts = stats = arrived = None
    if splits > 1:
        parts, stats = (
            torch.empty(batch, query_heads, splits, n, dtype=torch.float32, device=heads.device)
            for n in (head_size, 2)
        )
        arrived = _arrivals(heads.get_device(), batch * slices)
    most = ceil_div(BLOCKS_PER_MULTIPROCESSOR * multiprocessors(heads), max(1, slices * batch))
    # 0: no launch counts as resident, so none prefetches.
    resident = RESIDENT_BLOCKS * multiprocessors(heads) if current().prefetch else 0
    launch(
        _instance(heads.dtype, keys.dtype, head_size, group),
        (slices, batch, min(splits, most)),
        (THREADS,),
        heads,
        np.int64(heads.stride(0)),
        *finish,
        keys,
        cached.values,
        *scale_arguments(cached.scales),
        block_tables,
        np.int32(block_tables.shape[1]),
        cached.lengths,
        np.int32(splits),
        np.int32(kv_heads),
        np.int32(heads_per_kv),
        np.int32(block_size.bit_length() - 1),
        np.int32(resident),
        np.float32(scale),
        out,
        lse,
        parts,
        stats,
        arrived,
    )
    return out


def part_bytes(positions: int, batch: int, query_heads: int, head_size: int) -> int:
    """Return at most how many bytes of partial results a launch has in memory of its own.

    positions: of all block tables together, those that are not filled included.
    """
    parts = positions // SPLIT + batch
    return parts * query_heads * (head_size + 2) * torch.float32.itemsize


def specialisations() -> Iterator[Kernel]:
    """Yield every instance that the engine uses."""
    for storage in STORAGE:
        for cached in (storage, FP8):
            for head_size in HEAD_SIZES:
                for group in GROUPS:
                    yield _instance(storage, cached, head_size, group)


def _instance(storage: torch.dtype, cached: torch.dtype, head_size: int, group: int) -> Kernel:
    """storage: of the heads; cached: of the cache; group: query heads of a block."""
    arguments = storage, cached, head_size, group, SPLIT
    return Kernel.of("decode_attention", "decode_attention", *arguments)


def _arrivals(device: int, count: int) -> Tensor:
    """Return zeros int32[count at least].

    Each launch leaves them as zeros.  All launches of a device are on one stream, one at a time.
    """
    held = _held.setdefault(device, [])
    if not held or held[-1].numel() < count:
        where = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
        held.append(torch.zeros(max(count, LEAST_ARRIVALS), dtype=torch.int32, device=where))
    return held[-1]


_held: dict[int, list[Tensor]] = {}
"""Counters by device.  Smaller ones are kept, because recorded graphs hold their addresses."""


def _check(q: Tensor, cached: _Cached) -> None:
    """See check."""
    check_paged(q, cached.keys, cached.values, cached.scales)
    batch = q.shape[0]
    check("block_tables", cached.block_tables, torch.int32, (batch, None), like=q)
    check("lengths", cached.lengths, torch.int32, (batch,), like=q)
