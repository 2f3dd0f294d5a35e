"""The attention of a layer on a GPU: prompt rows, running sequences and documents together."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nightjar.kernels.cuda import decode_attention as decode
from nightjar.kernels.cuda import qkv_post as post
from nightjar.kernels.cuda.prompt_attention import branch_attention, prefill_attention
from nightjar.kernels.heads import CacheScales, CacheWrite, HeadNorms, Rotation
from nightjar.kernels.layout import PagedLayout, PagedTensors, StepRows


def attend(
    qkv: Tensor,
    norms: HeadNorms | None,
    rotation: Rotation | None,
    cache: CacheWrite,
    rows: StepRows,
    scale: float,
) -> Tensor:
    """As reference.attention.attend.

    Where it can, the attention of running sequences finishes their heads itself.  Other rows need
    `qkv_post` first.
    """
    keys, values, scales, kv_heads = cache.keys, cache.values, cache.scales, cache.keys.shape[1]
    query_heads = qkv.shape[1] - 2 * kv_heads
    prefill, cached = rows.prefill_rows, cache.blocks.shape[0]
    running = slice(prefill, cached)
    finishes = decode.finishes_heads(query_heads, kv_heads)
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
        cached_too = keys, values, rows.prefill, scale, scales
        parts.append(prefill_attention(q[:prefill], *cached_too, own=own))
    if rows.decode is not None and finishes:
        rotated, written = _of_rows(running, rotation, cache)
        layout = rows.decode.on(qkv.device)
        tables = layout.tables, layout.lengths
        parts.append(decode.decode_heads(qkv[running], norms, rotated, written, *tables, scale))
    elif rows.decode is not None:
        parts.append(decode_attention(q[running], keys, values, rows.decode, scale, scales))
    if rows.branch is not None:
        documents = q[cached:], k[cached:], v[cached:]
        parts.append(branch_attention(*documents, keys, values, rows.branch, scale, scales))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def qkv_post(
    qkv: Tensor, norms: HeadNorms | None, rotation: Rotation | None, cache: CacheWrite
) -> None:
    """As reference.attention.qkv_post, in one launch."""
    query_heads = qkv.shape[1] - 2 * cache.keys.shape[1]
    written = cache if cache.blocks.shape[0] else None
    post.qkv_post(qkv, query_heads, norms, rotation, written)


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: PagedLayout | PagedTensors,
    scale: float,
    scales: CacheScales | None = None,
) -> Tensor:
    """As reference.decode.decode_attention; a PagedLayout is brought to the device once a step."""
    found = layout.on(q.device)
    tables = found.tables, found.lengths
    return decode.decode_attention(q, keys, values, *tables, scale, scales=scales)


def _of_rows(
    rows: slice, rotation: Rotation | None, cache: CacheWrite
) -> tuple[Rotation | None, CacheWrite]:
    """Return the rotations of some rows, and where their keys and values are cached."""
    of_rows = None if rotation is None else replace(rotation, positions=rotation.positions[rows])
    return of_rows, replace(cache, blocks=cache.blocks[rows], offsets=cache.offsets[rows])
