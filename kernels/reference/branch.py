"""Attention of documents to their own tokens and to the cached keys of a shared query."""

from torch import Tensor

from nightjar.kernels.layout import BranchLayout
from nightjar.kernels.reference.merge import merge_attention
from nightjar.kernels.reference.prefill import flash, padded, prefill_attention, unpadded


def branch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: BranchLayout,
    scale: float,
) -> Tensor:
    """Attention of packed documents, each after its query.

    q: [T, H, D]; k, v: [T, Hkv, D], the documents' own; keys, values: [blocks, Hkv, S, D], the
    cache that holds the queries' keys and values (computed once, read by every document).
    Returns [T, H, D] in q's dtype.
    """
    own, own_lse = prefill_attention(q, k, v, layout.own, scale)
    outs, lses = [], []
    for group, (blocks, length) in zip(layout.shared.groups, layout.prefixes, strict=True):
        batch = padded(q, group)
        shared_k = _prefix(keys, blocks, length).expand(batch.shape[0], -1, -1, -1)
        shared_v = _prefix(values, blocks, length).expand(batch.shape[0], -1, -1, -1)
        out, lse = flash(batch, shared_k, shared_v, scale, causal=False)
        outs.append(out)
        lses.append(lse)
    prefix, prefix_lse = unpadded(outs, layout.shared), unpadded(lses, layout.shared)
    return merge_attention(own, own_lse, prefix, prefix_lse)


def _prefix(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first `length` cached rows of a block table: [1, Hkv, length, D]."""
    pages = cache.index_select(0, blocks)
    rows = pages.transpose(0, 1).flatten(1, 2)
    return rows[:, :length].unsqueeze(0)
