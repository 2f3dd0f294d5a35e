"""Attention of one row per sequence to its cached keys."""

from collections.abc import Callable

import torch
from torch import Tensor

from nightjar.kernels.layout import PagedLayout


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout, scale: float
) -> Tensor:
    """One decode step's attention; the lengths in the layout are the mask.

    q: [B, H, D]; keys, values: [blocks, Hkv, S, D].  Returns [B, H, D] in q's dtype.
    Each cache block is one product of a fixed shape, and the blocks of a sequence are summed in
    ascending order, in FP32: a sequence's result does not depend on the others' lengths.
    """
    n_heads, head_size = q.shape[1:]
    kv_heads, block_size = keys.shape[1:3]
    pairs = layout.blocks.shape[0]
    rows = q.float().index_select(0, layout.order).index_select(0, layout.owners) * scale
    rows = rows.view(pairs * kv_heads, n_heads // kv_heads, head_size)
    k = keys.index_select(0, layout.blocks).float().view(-1, block_size, head_size)
    v = values.index_select(0, layout.blocks).float().view(-1, block_size, head_size)
    scores = torch.bmm(rows, k.transpose(1, 2)).view(pairs, n_heads, block_size)
    scores += layout.mask.unsqueeze(1)
    top = _fold(scores.amax(-1), layout.counts, torch.maximum)
    weights = scores.sub_(top.index_select(0, layout.owners).unsqueeze(-1)).exp_()
    partial = torch.bmm(weights.view(pairs * kv_heads, -1, block_size), v)
    total = _fold(weights.sum(-1), layout.counts, torch.add)
    out = _fold(partial.view(pairs, n_heads, head_size), layout.counts, torch.add)
    return (out / total.unsqueeze(-1)).index_select(0, layout.inverse).to(q.dtype)


def _fold(parts: Tensor, counts: tuple[int, ...], op: Callable[..., Tensor]) -> Tensor:
    """Combine the blocks of each sequence in ascending order: [N, ...] -> [B, ...]."""
    whole = parts[: counts[0]]
    start = counts[0]
    for count in counts[1:]:
        op(whole[:count], parts[start : start + count], out=whole[:count])
        start += count
    return whole
