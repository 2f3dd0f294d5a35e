"""Attention of documents to their own tokens and to the cached keys of a shared prefix."""

import torch
from torch import Tensor

from nightjar.kernels.heads import CacheScales
from nightjar.kernels.layout import BranchLayout
from nightjar.kernels.reference.merge import merge_attention
from nightjar.kernels.reference.paged_cache import cached_blocks, with_scales
from nightjar.kernels.reference.plans import BranchPlan, RaggedGroup, RaggedPlan
from nightjar.kernels.reference.prefill import flash


def branch_attention(  # noqa: PLR0913, PLR0917 - rows, cache, layout
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: BranchLayout,
    scale: float,
    scales: CacheScales | None = None,
) -> Tensor:
    """Compute the attention of packed documents, each after its prefix.

    q: [T, H, D]; k, v: [T, Hkv, D], of the documents; keys, values: [blocks, Hkv, S, D], the cache
    with the prefixes' keys and values (computed once, read by every document); scales: of a cache
    in FP8.
    Returns [T, H, D] in q's dtype.
    """
    plan = layout.plan(BranchPlan.of)
    heads_per_kv = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for group in plan.own.groups:
        own_k, own_v = (
            _padded(x, group).repeat_interleave(heads_per_kv, 1)
            if heads_per_kv > 1
            else _padded(x, group)
            for x in (k, v)
        )
        out, lse = flash(_padded(q, group), own_k, own_v, scale, causal=True)
        outs.append(out)
        lses.append(lse)
    own, own_lse = _unpadded(outs, plan.own), _unpadded(lses, plan.own)
    outs, lses = [], []
    for group, (blocks, length) in zip(plan.shared.groups, plan.prefixes, strict=True):
        batch = _padded(q, group)
        n, n_heads, padded, head_size = batch.shape
        # The query heads of one KV head become rows of one product.
        rows = batch.reshape(n, n_heads // heads_per_kv, heads_per_kv * padded, head_size)
        shared_k, shared_v = (
            _prefix(*cached, blocks, length, q.dtype).expand(n, -1, -1, -1)
            for cached in with_scales(keys, values, scales)
        )
        out, lse = flash(rows, shared_k, shared_v, scale)
        outs.append(out.reshape(n, n_heads, padded, head_size))
        lses.append(lse.reshape(n, n_heads, padded))
    prefix, prefix_lse = _unpadded(outs, plan.shared), _unpadded(lses, plan.shared)
    return merge_attention(own, own_lse, prefix, prefix_lse)


def _padded(x: Tensor, group: RaggedGroup) -> Tensor:
    """Return the rows of a group as a batch: [T, H, D] -> [n, H, padded, D]."""
    rows = x.index_select(0, group.rows)
    return rows.view(-1, group.padded, *x.shape[1:]).transpose(1, 2)


def _unpadded(parts: list[Tensor], layout: RaggedPlan) -> Tensor:
    """Return the groups' results [n, H, padded, ...] as packed rows [T, H, ...]."""
    flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    whole = flat[0] if len(flat) == 1 else torch.cat(flat)
    return whole.index_select(0, layout.unpad)


def _prefix(
    cache: Tensor, scales: Tensor | None, blocks: Tensor, length: int, dtype: torch.dtype
) -> Tensor:
    """Return the first `length` cached rows of a block table: dtype[1, Hkv, length, D]."""
    pages = cached_blocks(cache, scales, blocks, dtype)
    rows = pages.transpose(0, 1).flatten(1, 2)
    return rows[:, :length].unsqueeze(0)
