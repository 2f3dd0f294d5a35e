"""Writes keys and values into the paged cache, and reads them."""

import torch
from torch import Tensor

from nightjar.kernels.heads import CacheScales
from nightjar.kernels.reference.fp8_rows import dequantised, quantised


def kv_write(
    keys: Tensor,
    values: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    scales: CacheScales | None = None,
) -> None:
    """Store the keys and values of packed rows, in place.

    keys, values: [blocks, Hkv, S, D], one layer of the cache; k, v: [T, Hkv, D];
    blocks, offsets: int64[T], the cache block of each row and its offset in the block; scales: of a
    cache in FP8.
    """
    if scales is None:
        keys[blocks, :, offsets] = k.to(keys.dtype)
        values[blocks, :, offsets] = v.to(values.dtype)
        return
    for cache, factors, x in ((keys, scales.keys, k), (values, scales.values, v)):
        cache[blocks, :, offsets], factors[blocks, :, offsets] = quantised(x)


def with_scales(
    keys: Tensor, values: Tensor, scales: CacheScales | None
) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """Return keys and values, each with its own scales, or with None."""
    if scales is None:
        return (keys, None), (values, None)
    return (keys, scales.keys), (values, scales.values)


def cached_blocks(
    cache: Tensor, scales: Tensor | None, blocks: Tensor | slice, dtype: torch.dtype
) -> Tensor:
    """Return some blocks of a layer's keys, or of its values, as numbers: dtype[n, Hkv, S, D].

    cache: [blocks, Hkv, S, D]; scales: uint8[blocks, Hkv, S] of a cache in FP8, or None.
    """
    if scales is None:
        return cache[blocks].to(dtype)
    return dequantised(cache[blocks], scales[blocks], dtype)
