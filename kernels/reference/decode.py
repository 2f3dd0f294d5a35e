"""Attention of one row per sequence to its cached keys."""

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
    pages = layout.page_rows.shape[0]
    products = pages * kv_heads, n_heads // kv_heads
    rows = (q.float() * scale).index_select(0, layout.page_rows)
    k = keys[layout.pages].float().view(-1, block_size, head_size)
    v = values[layout.pages].float().view(-1, block_size, head_size)
    scores = torch.bmm(rows.view(*products, head_size), k.transpose(1, 2))
    scores = scores.view(pages, n_heads, block_size).index_select(0, layout.places)
    weights = scores.new_zeros(pages, n_heads, block_size)
    weights.index_copy_(0, layout.places, _softmax_over_blocks(scores, layout))
    partial = torch.bmm(weights.view(*products, block_size), v)
    partial = partial.view(pages, n_heads, head_size).index_select(0, layout.places)
    out = _sum_blocks(partial, layout.counts)
    return out.index_select(0, layout.inverse).to(q.dtype)


def _softmax_over_blocks(scores: Tensor, layout: PagedLayout) -> Tensor:
    """Softmax of each sequence over all of its blocks: [N, H, S] -> [N, H, S].

    The scores are laid out as one padded row per sequence and head; trailing -inf adds zeros to
    the row's sum and changes none of its bits.
    """
    _, n_heads, block_size = scores.shape
    scores += layout.mask.unsqueeze(1)
    shape = layout.counts[0], n_heads, len(layout.counts), block_size
    padded = scores.new_full(shape, float("-inf"))
    padded[layout.owners, :, layout.steps] = scores
    weights = padded.flatten(2).softmax(-1).view(shape)
    return weights[layout.owners, :, layout.steps]


def _sum_blocks(parts: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Add up the blocks of each sequence in ascending order: [N, H, D] -> [B, H, D]."""
    whole = parts[: counts[0]]
    start = counts[0]
    for count in counts[1:]:
        whole[:count] += parts[start : start + count]
        start += count
    return whole
