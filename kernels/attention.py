"""Attention over the paged cache, by whichever backend serves its dtype and device.

The cache may be narrower than the rows: an FP16 cache beside FP32 rows, say.
"""

from dataclasses import replace

import torch
from torch import Tensor

from nightjar.kernels import cuda_ops, native, reference
from nightjar.kernels.cuda.launch import serves
from nightjar.kernels.heads import CacheWrite, HeadNorms, Rotation
from nightjar.kernels.layout import (
    BranchLayout,
    ChunkLayout,
    PagedLayout,
    PagedTensors,
    StepRows,
)
from nightjar.kernels.norm import rms_norm
from nightjar.kernels.reference.paged_cache import kv_write


def attend(
    qkv: Tensor,
    norms: HeadNorms | None,
    rotation: Rotation | None,
    cache: CacheWrite,
    rows: StepRows,
    scale: float,
) -> Tensor:
    """The attention of a layer: `qkv_post`, then that of every row.

    qkv: [T, Hq + 2 Hkv, D], contiguous, of no further use; cache: where the prompt rows and the
    running texts go; scale multiplies the scores.  Returns [T, Hq, D] in qkv's dtype; rows that are
    not wanted hold anything.
    """
    if not serves(qkv) and native.attention.serves(qkv, cache.keys):
        return native.attention.attend(qkv, norms, rotation, cache, rows, scale)
    if not serves(qkv) and qkv.dtype == torch.float16:
        # In half precision torch would round every step in between.
        return attend(qkv.float(), norms, rotation, cache, rows, scale).half()
    keys, values, kv_heads = cache.keys, cache.values, cache.keys.shape[1]
    query_heads = qkv.shape[1] - 2 * kv_heads
    prefill, cached = rows.prefill_rows, cache.blocks.shape[0]
    running = slice(prefill, cached)
    # On a GPU the attention of running texts finishes their heads itself.
    finishes = serves(qkv) and cuda_ops.finishes_heads(query_heads, kv_heads)
    if finishes and rows.decode is not None:
        for others in (slice(0, prefill), slice(cached, qkv.shape[0])):
            if others.start < others.stop:
                qkv_post(qkv[others], norms, *_of_rows(others, rotation, cache))
    else:
        qkv_post(qkv, norms, rotation, cache)
    q, k, v = torch.split(qkv, [query_heads, kv_heads, kv_heads], dim=1)
    parts = []
    if rows.prefill is not None:
        own = k[:prefill], v[:prefill]
        parts.append(prefill_attention(q[:prefill], keys, values, rows.prefill, scale, own))
    if rows.decode is not None and finishes:
        turned, written = _of_rows(running, rotation, cache)
        layout = rows.decode.on(qkv.device)
        tables = layout.tables, layout.lengths
        parts.append(cuda_ops.decode_heads(qkv[running], norms, turned, written, *tables, scale))
    elif rows.decode is not None:
        parts.append(decode_attention(q[running], keys, values, rows.decode, scale))
    if rows.branch is not None:
        documents = q[cached:], k[cached:], v[cached:]
        parts.append(branch_attention(*documents, keys, values, rows.branch, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _of_rows(
    rows: slice, rotation: Rotation | None, cache: CacheWrite
) -> tuple[Rotation | None, CacheWrite]:
    """What some rows are turned by, and where those of them that are cached go."""
    turned = None if rotation is None else replace(rotation, positions=rotation.positions[rows])
    return turned, replace(cache, blocks=cache.blocks[rows], offsets=cache.offsets[rows])


def qkv_post(
    qkv: Tensor, norms: HeadNorms | None, rotation: Rotation | None, cache: CacheWrite
) -> None:
    """Normalise and turn queries and keys, in place, and write keys and values into the cache.

    qkv: [T, Hq + 2 Hkv, D], packed as query, key, value heads, contiguous.  On a GPU one launch.
    """
    kv_heads = cache.keys.shape[1]
    query_heads = qkv.shape[1] - 2 * kv_heads
    if serves(qkv):
        written = cache if cache.blocks.shape[0] else None
        cuda_ops.qkv_post(qkv, query_heads, norms, rotation, written)
        return
    q, k, v = torch.split(qkv, [query_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        for part, weight in ((q, norms.query), (k, norms.key)):
            part.copy_(rms_norm(part, None, weight, norms.epsilon, qkv.dtype))
    if rotation is not None:
        reference.rotary.rotary(qkv[:, : query_heads + kv_heads], *rotation.angles)
    if rows := cache.blocks.shape[0]:
        kv_write(cache.keys, cache.values, k[:rows], v[:rows], cache.blocks, cache.offsets)


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: ChunkLayout,
    scale: float,
    own: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention of packed prompt rows to everything up to themselves.

    q: [T, H, D]; keys, values: [blocks, Hkv, S, D], one layer of the cache, which holds the rows'
    own keys and values already; scale multiplies the scores; own: those keys and values once more,
    [T, Hkv, D] each, for backends that gather what they read.  Returns [T, H, D] in q's dtype.
    """
    if serves(q):
        return cuda_ops.prefill_attention(q, keys, values, layout, scale, own)
    if native.attention.serves(q, keys):
        return native.attention.prefill_attention(q, keys, values, layout, scale)
    return reference.prefill.prefill_attention(q, keys, values, layout, scale)


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout | PagedTensors, scale: float
) -> Tensor:
    """One decode step's attention; the lengths in the layout are the mask.

    q: [B, H, D]; keys, values: [blocks, Hkv, S, D].  Returns [B, H, D] in q's dtype.
    """
    if serves(q):
        found = layout.on(q.device)
        return cuda_ops.decode_attention(q, keys, values, found.tables, found.lengths, scale)
    if isinstance(layout, PagedTensors):
        raise TypeError("a layout on the device serves the CUDA kernels only: give a PagedLayout")
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
    if serves(q):
        return cuda_ops.branch_attention(q, k, v, keys, values, layout, scale)
    if native.attention.serves(q, keys):
        return native.attention.branch_attention(q, k, v, keys, values, layout, scale)
    return reference.branch.branch_attention(q, k, v, keys, values, layout, scale)


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """Attention over the union of two key sets, from the results over each.

    out_a, out_b: [T, H, D], softmax-weighted values over each set; lse_a, lse_b: float32[T, H],
    the log-sum-exp of each set's scores.  Returns [T, H, D] in out_a's dtype.
    """
    if serves(out_a):
        return cuda_ops.merge_attention(out_a, lse_a, out_b, lse_b)
    return reference.merge.merge_attention(out_a, lse_a, out_b, lse_b)
