"""The attention of a layer: prompt rows, running sequences and documents together."""

import torch
from torch import Tensor

from nightjar.kernels.heads import CacheWrite, HeadNorms, Rotation
from nightjar.kernels.layout import StepRows
from nightjar.kernels.reference.branch import branch_attention
from nightjar.kernels.reference.decode import decode_attention
from nightjar.kernels.reference.fp8_rows import dequantised
from nightjar.kernels.reference.norm import rms_norm
from nightjar.kernels.reference.paged_cache import kv_write
from nightjar.kernels.reference.prefill import prefill_attention
from nightjar.kernels.reference.rotary import rotary


def attend(
    qkv: Tensor,
    norms: HeadNorms | None,
    rotation: Rotation | None,
    cache: CacheWrite,
    rows: StepRows,
    scale: float,
) -> Tensor:
    """Compute the attention of a layer: `qkv_post`, then the attention of every row.

    qkv: [T, Hq + 2 Hkv, D], contiguous, may be overwritten; cache: where the keys and values of
    prompt rows and running sequences are written; scale multiplies the scores.  The cache may be
    narrower than the rows, for example FP16 for FP32 rows, or FP8 for rows of any dtype.
    Returns [T, Hq, D] in qkv's dtype; unwanted rows are undefined.
    """
    if qkv.dtype == torch.float16:
        # In half precision torch would round every step in between.
        return attend(qkv.float(), norms, rotation, cache, rows, scale).half()
    keys, values, scales, kv_heads = cache.keys, cache.values, cache.scales, cache.keys.shape[1]
    prefill, cached = rows.prefill_rows, cache.blocks.shape[0]
    qkv_post(qkv, norms, rotation, cache)
    q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    parts = []
    if rows.prefill is not None:
        parts.append(prefill_attention(q[:prefill], keys, values, rows.prefill, scale, scales))
    if rows.decode is not None:
        running = q[prefill:cached]
        parts.append(decode_attention(running, keys, values, rows.decode, scale, scales))
    if rows.branch is not None:
        documents = q[cached:], k[cached:], v[cached:]
        parts.append(branch_attention(*documents, keys, values, rows.branch, scale, scales))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def qkv_post(
    qkv: Tensor, norms: HeadNorms | None, rotation: Rotation | None, cache: CacheWrite
) -> None:
    """Normalise and rotate queries and keys, in place, and write keys and values into the cache.

    qkv: [T, Hq + 2 Hkv, D], packed as query, key, value heads, contiguous.  On a GPU one launch.
    Where the cache is in FP8, the keys and values of cached rows become what the cache keeps.
    """
    kv_heads = cache.keys.shape[1]
    query_heads = qkv.shape[1] - 2 * kv_heads
    q, k, v = torch.split(qkv, [query_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        for part, weight in ((q, norms.query), (k, norms.key)):
            part.copy_(rms_norm(part, None, weight, norms.epsilon, qkv.dtype))
    if rotation is not None:
        rotary(qkv[:, : query_heads + kv_heads], *rotation.angles)
    if rows := cache.blocks.shape[0]:
        own, written = (k[:rows], v[:rows]), (cache.blocks, cache.offsets)
        kv_write(cache.keys, cache.values, *own, *written, cache.scales)
        if cache.scales is not None:
            places = cache.blocks, slice(None), cache.offsets
            kept = (cache.keys, cache.scales.keys), (cache.values, cache.scales.values)
            for part, (codes, exponents) in zip(own, kept, strict=True):
                part.copy_(dequantised(codes[places], exponents[places], qkv.dtype))
