"""Head norms, rotation and the cache write after the QKV projection: see qkv_post.cu.

Bytes of T rows, a head of D channels of s bytes: T * D * s * (2 (Hq + Hkv) read and written back,
+ Hkv values read, + 2 Hkv written to the cache).  Heads that nothing changes are not read: without
norm and rotation only keys and values are, 2 Hkv, and written to the cache.  At most 20 operations
an element: bound by memory.  One launch instead of four (two norms, rotation, write).

Running sequences need no launch of their own where at most 8 query heads share a key head:
decode_attention.py finishes their heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import INT32_MAX, ceil_div, check, check_cache, check_storage
from nightjar.kernels.cuda.kernel import FP8, HEAD_SIZES, STORAGE, Argument, Kernel
from nightjar.kernels.cuda.launch import launch
from nightjar.kernels.heads import CacheScales, CacheWrite, HeadNorms, Rotation

HEADS_PER_BLOCK = 4
"""Heads of a block, a warp each: 128 threads; a row of decode with 48 heads is 12 blocks."""


def qkv_post(
    qkv: Tensor,
    query_heads: int,
    norms: HeadNorms | None = None,
    rotation: Rotation | None = None,
    cache: CacheWrite | None = None,
) -> None:
    """Finish queries, keys and values in place, and write keys and values into the cache.

    qkv: [T, Hq + 2 Hkv, D], packed as query, key, value heads.
    Reference: `kernels.rms_norm` and `kernels.rotary` of the heads, then `kernels.kv_write`.  Where
    the cache is in FP8, keys and values of cached rows become what it keeps of them.
    """
    check_storage("qkv", qkv)
    check("qkv", qkv, qkv.dtype, (None, None, None))
    rows, heads, head_size = qkv.shape
    if rows * heads > INT32_MAX - HEADS_PER_BLOCK:
        raise ValueError(f"{rows} rows of {heads} heads at once: give fewer rows")
    kv_heads = check_heads(qkv, query_heads, norms, rotation, cache)
    launch(
        Kernel.of(
            "qkv_post",
            "qkv_post",
            qkv.dtype,
            qkv.dtype if cache is None else cache.keys.dtype,
            head_size,
        ),
        (ceil_div(rows * heads, HEADS_PER_BLOCK),),
        (32, HEADS_PER_BLOCK),
        qkv,
        *norm_arguments(norms),
        *rotation_arguments(rotation),
        *_cache_arguments(cache),
        np.int32(rows * heads),
        np.int32(query_heads),
        np.int32(kv_heads),
        np.int32(0 if cache is None else cache.blocks.shape[0]),
        np.int32(1 if cache is None else cache.keys.shape[2]),
    )


def specialisations() -> Iterator[Kernel]:
    """Yield every instance that the engine uses."""
    for storage in STORAGE:
        for cached in (storage, FP8):
            for head_size in HEAD_SIZES:
                yield Kernel.of("qkv_post", "qkv_post", storage, cached, head_size)


def check_heads(
    qkv: Tensor,
    query_heads: int,
    norms: HeadNorms | None,
    rotation: Rotation | None,
    cache: CacheWrite | None,
) -> int:
    """See check; how many key heads there are."""
    heads, head_size = qkv.shape[1:]
    kv_heads = (heads - query_heads) // 2
    if query_heads < 1 or kv_heads < 1 or query_heads + 2 * kv_heads != heads:
        raise ValueError(f"{heads} heads are not {query_heads} query heads and pairs of key, value")
    if head_size not in HEAD_SIZES:
        raise ValueError(f"heads of {head_size} channels: there are kernels for {HEAD_SIZES}")
    if norms is not None:
        check("query norm", norms.query, torch.float32, (head_size,), like=qkv)
        check("key norm", norms.key, torch.float32, (head_size,), like=qkv)
    if rotation is not None:
        _check_rotation(rotation, qkv)
    if cache is not None:
        _check_cache(cache, qkv, kv_heads)
    return kv_heads


def norm_arguments(norms: HeadNorms | None) -> tuple[Argument, ...]:
    """Two weights and epsilon."""
    if norms is None:
        return None, None, np.float32(0)
    return norms.query, norms.key, np.float32(norms.epsilon)


def rotation_arguments(rotation: Rotation | None) -> tuple[Argument, ...]:
    """Cosines, sines, positions, and the table's sizes."""
    if rotation is None:
        return None, None, None, np.int64(0), np.int32(0)
    sizes = rotation.cosines.shape
    tables = rotation.cosines, rotation.sines, rotation.positions
    return *tables, np.int64(sizes[0]), np.int32(sizes[1])


def _check_rotation(rotation: Rotation, qkv: Tensor) -> None:
    """See check."""
    rows, _, head_size = qkv.shape
    n = rotation.cosines.shape[-1]
    check("cosines", rotation.cosines, torch.float32, (None, n), like=qkv)
    check("sines", rotation.sines, torch.float32, rotation.cosines.shape, like=qkv)
    check("positions", rotation.positions, torch.int64, (rows,), like=qkv)
    if 2 * n > head_size:
        raise ValueError(f"{n} angles rotate {2 * n} channels, a head has {head_size}")


def _check_cache(cache: CacheWrite, qkv: Tensor, kv_heads: int) -> None:
    """See check."""
    rows, _, head_size = qkv.shape
    shape = (None, kv_heads, None, head_size)
    check_cache(cache.keys, cache.values, cache.scales, shape, like=qkv)
    check("blocks", cache.blocks, torch.int64, (None,), like=qkv)
    check("offsets", cache.offsets, torch.int64, cache.blocks.shape, like=qkv)
    if cache.blocks.shape[0] > rows:
        raise ValueError(f"{cache.blocks.shape[0]} rows are to be cached, there are {rows}")


def _cache_arguments(cache: CacheWrite | None) -> tuple[Argument, ...]:
    """The caches, and where the rows go."""
    if cache is None:
        return (None,) * 6
    return cache.keys, cache.values, *scale_arguments(cache.scales), cache.blocks, cache.offsets


def scale_arguments(scales: CacheScales | None) -> tuple[Argument, Argument]:
    """The scales of keys and values."""
    return (None, None) if scales is None else (scales.keys, scales.values)
