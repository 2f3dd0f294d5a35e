"""Attention of one row per sequence to its cached keys."""

from collections.abc import Iterator

import torch
from torch import Tensor

from nightjar.kernels.heads import CacheScales
from nightjar.kernels.layout import PagedLayout, PagedTensors
from nightjar.kernels.reference.paged_cache import cached_blocks, with_scales
from nightjar.kernels.reference.plans import BlockPlan, Pages
from nightjar.kernels.reference.widened import widened


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: PagedLayout | PagedTensors,
    scale: float,
    scales: CacheScales | None = None,
) -> Tensor:
    """Compute one decode step's attention; the lengths in the layout are the mask.

    q: [B, H, D]; keys, values: [blocks, Hkv, S, D]; scales: of a cache in FP8.
    Returns [B, H, D] in q's dtype.
    Each cache block is one product of a fixed shape.  The blocks of a sequence are summed in
    ascending order, in FP32.  So a sequence's result does not depend on the lengths of others.
    """
    if isinstance(layout, PagedTensors):
        raise TypeError("a layout on the device serves the CUDA kernels only: give a PagedLayout")
    n_heads, head_size = q.shape[1:]
    kv_heads, block_size = keys.shape[1:3]
    plan = layout.plan(BlockPlan.of)
    of_keys, of_values = with_scales(keys, values, scales)
    pages = plan.pages.count
    products = pages * kv_heads, n_heads // kv_heads
    rows = (widened(q) * scale).index_select(0, plan.page_rows)
    rows = rows.view(*products, head_size)
    scores = rows.new_empty(*products, block_size)
    for run, k in _read(*of_keys, plan.pages, rows.dtype):
        torch.bmm(rows[run], k.transpose(1, 2), out=scores[run])
    scores = scores.view(pages, n_heads, block_size).index_select(0, plan.pair_pages)
    weights = scores.new_zeros(pages, n_heads, block_size)
    weights.index_copy_(0, plan.pair_pages, _softmax_over_blocks(scores, plan))
    weights = weights.view(*products, block_size)
    partial = weights.new_empty(*products, head_size)
    for run, v in _read(*of_values, plan.pages, rows.dtype):
        torch.bmm(weights[run], v, out=partial[run])
    partial = partial.view(pages, n_heads, head_size).index_select(0, plan.pair_pages)
    out = _sum_blocks(partial, plan.counts)
    return out.index_select(0, plan.inverse).to(q.dtype)


def _read(
    cache: Tensor, scales: Tensor | None, pages: Pages, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the pages of the cache [blocks, Hkv, S, D], run by run.

    Each run comes as the slice of its products and dtype[n * Hkv, S, D].
    """
    kv_heads, start = cache.shape[1], 0
    parts: list[slice | Tensor] = [slice(low, high) for low, high in pages.runs]
    if pages.singles.numel():
        parts.append(pages.singles)
    for blocks in parts:
        part = cached_blocks(cache, scales, blocks, dtype)
        end = start + part.shape[0] * kv_heads
        yield slice(start, end), part.flatten(0, 1)
        start = end


def _softmax_over_blocks(scores: Tensor, plan: BlockPlan) -> Tensor:
    """Compute the softmax of each sequence over all of its blocks: [N, H, S] -> [N, H, S].

    Each sequence and head has one padded row of scores.  Trailing -inf adds zeros to the row's sum
    and changes none of its bits.
    """
    _, n_heads, block_size = scores.shape
    scores.masked_fill_(plan.hidden.unsqueeze(1), float("-inf"))
    shape = plan.counts[0], n_heads, len(plan.counts), block_size
    padded = scores.new_full(shape, float("-inf"))
    padded[plan.owners, :, plan.steps] = scores
    weights = padded.flatten(2).softmax(-1).view(shape)
    return weights[plan.owners, :, plan.steps]


def _sum_blocks(parts: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Add up the blocks of each sequence in ascending order: [N, H, D] -> [B, H, D]."""
    whole = parts[: counts[0]]
    start = counts[0]
    for count in counts[1:]:
        whole[:count] += parts[start : start + count]
        start += count
    return whole
