"""Attention of prompt rows to their cached keys, tile by tile."""

from functools import lru_cache

import torch
from torch import Tensor

from nightjar.kernels.heads import CacheScales
from nightjar.kernels.layout import ChunkLayout, ChunkTensors
from nightjar.kernels.reference.paged_cache import cached_blocks, with_scales
from nightjar.kernels.reference.plans import TileGroup, TilePlan


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: ChunkLayout | ChunkTensors,
    scale: float,
    scales: CacheScales | None = None,
) -> Tensor:
    """Compute the causal attention of packed prompt rows to everything up to themselves.

    q: [T, H, D]; keys, values: [blocks, Hkv, S, D], one layer of the cache, which already holds the
    rows' own keys and values; scale multiplies the scores; scales: of a cache in FP8.
    Returns [T, H, D] in q's dtype.
    """
    if isinstance(layout, ChunkTensors):
        raise TypeError("a layout on the device serves the CUDA kernels only: give a ChunkLayout")
    _, n_heads, head_size = q.shape
    kv_heads, block_size = keys.shape[1:3]
    heads_per_kv = n_heads // kv_heads
    plan = layout.plan(TilePlan.of)
    outs = []
    for group in plan.groups:
        k, v = (_gathered(*x, group, q.dtype) for x in with_scales(keys, values, scales))
        for tile, rows in enumerate(group.rows, group.first):
            length = (tile + 1) * block_size
            # The query heads of one KV head become rows of one product.
            heads = q.index_select(0, rows).view(group.n, block_size, kv_heads, heads_per_kv, -1)
            heads = heads.permute(0, 2, 3, 1, 4).reshape(group.n, kv_heads, -1, head_size)
            mask = _tile_mask(block_size, heads_per_kv, length, q.dtype)
            out, _ = flash(heads, k[:, :, :length], v[:, :, :length], scale, mask)
            out = out.view(group.n, kv_heads, heads_per_kv, block_size, head_size)
            outs.append(out.permute(0, 3, 1, 2, 4).reshape(-1, n_heads, head_size))
    whole = outs[0] if len(outs) == 1 else torch.cat(outs)
    return whole.index_select(0, plan.unpad)


def flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute torch's tiled attention and its log-sum-exp: q [n, H, Lq, D], k and v [n, H, Lk, D].

    mask: [Lq, Lk], added to the scores.  Softmax and sums run in FP32 for every storage dtype.
    Returns [n, H, Lq, D] in q's dtype and float32[n, H, Lq].
    """
    out: Tensor
    lse: Tensor
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse


def _gathered(cache: Tensor, scales: Tensor | None, group: TileGroup, dtype: torch.dtype) -> Tensor:
    """Return the cached rows of a group's block tables, n of one length: [n, Hkv, tokens, D]."""
    pages = cached_blocks(cache, scales, group.blocks, dtype)
    pages = pages.view(group.n, -1, *cache.shape[1:])
    return pages.transpose(1, 2).flatten(2, 3)


@lru_cache(maxsize=512)
def _tile_mask(block_size: int, heads_per_kv: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return the mask of a tile that ends at `length`: 0 up to the row's position, -inf after."""
    positions = torch.arange(length)
    own = positions[-block_size:].unsqueeze(1)
    mask = torch.zeros(block_size, length, dtype=dtype).masked_fill_(positions > own, float("-inf"))
    return mask.repeat(heads_per_kv, 1)
