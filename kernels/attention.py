"""Attention over the paged cache, by whichever backend serves its dtype and device.

The cache may be narrower than the rows: an FP16 cache beside FP32 rows, say.
"""

from torch import Tensor

from nightjar.kernels import native, reference
from nightjar.kernels.layout import BranchLayout, ChunkLayout, PagedLayout


def prefill_attention(
    q: Tensor, keys: Tensor, values: Tensor, layout: ChunkLayout, scale: float
) -> Tensor:
    """Causal attention of packed prompt rows to everything up to themselves.

    q: [T, H, D]; keys, values: [blocks, Hkv, S, D], one layer of the cache, which holds the rows'
    own keys and values already; scale multiplies the scores.  Returns [T, H, D] in q's dtype.
    """
    if native.attention.serves(q, keys):
        return native.attention.prefill_attention(q, keys, values, layout, scale)
    return reference.prefill.prefill_attention(q, keys, values, layout, scale)


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout, scale: float
) -> Tensor:
    """One decode step's attention; the lengths in the layout are the mask.

    q: [B, H, D]; keys, values: [blocks, Hkv, S, D].  Returns [B, H, D] in q's dtype.
    """
    if native.attention.serves(q, keys):
        return native.attention.decode_attention(q, keys, values, layout, scale)
    return reference.decode.decode_attention(q, keys, values, layout, scale)


def branch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: BranchLayout,
    scale: float,
) -> Tensor:
    """Attention of packed documents, each after its prefix.

    q: [T, H, D]; k, v: [T, Hkv, D], the documents' own; keys, values: [blocks, Hkv, S, D], the
    cache that holds the prefixes' keys and values (computed once, read by every document).
    Returns [T, H, D] in q's dtype.
    """
    if native.attention.serves(q, keys):
        return native.attention.branch_attention(q, k, v, keys, values, layout, scale)
    return reference.branch.branch_attention(q, k, v, keys, values, layout, scale)


def kv_write(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor
) -> None:
    """Store the keys and values of packed rows, in place.

    keys, values: [blocks, Hkv, S, D], one layer of the cache; k, v: [T, Hkv, D];
    blocks, offsets: int64[T], the cache block of each row and its place in the block.
    """
    if native.attention.serves(k, keys):
        native.kv_write.kv_write(keys, values, k, v, blocks, offsets)
    else:
        reference.paged_cache.kv_write(keys, values, k, v, blocks, offsets)
