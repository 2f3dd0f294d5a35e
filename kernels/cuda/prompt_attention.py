"""Attention of prompts and of documents on a GPU.

Cached keys and values are read where they lie, by a kernel of our own (paged_prefill.py).  Prompts
that are computed whole, and documents, have all their keys beside them: there it is torch's flash
attention over packed sequences.  A row's keys always begin at position 0, and no sum is split.  So
its bits do not depend on how a prompt was cut, nor on the prefix cache.  Only between a step of
whole prompts and other steps may the last bits differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.merge import merge_attention
from nightjar.kernels.cuda.paged_prefill import TILE_ROWS, Span, TileArrays, Tiles, paged_prefill
from nightjar.kernels.cuda.varlen import Packed, varlen_attention
from nightjar.kernels.heads import CacheScales
from nightjar.kernels.layout import BranchLayout, ChunkLayout, ChunkTensors
from nightjar.kernels.upload import upload_together


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: ChunkLayout | ChunkTensors,
    scale: float,
    scales: CacheScales | None = None,
    *,
    own: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As reference.prefill.prefill_attention.

    own: the rows' own keys and values, [T, Hkv, D] each, as the cache keeps them; prompts that are
    computed whole need no others.  With a layout on the device, all are read from the cache.
    """
    if isinstance(layout, ChunkTensors):
        return paged_prefill(q, keys, values, layout, scale, causal=True, scales=scales)
    kept_dtype = keys.dtype if scales is None else q.dtype
    if own is not None and own[0].dtype == kept_dtype and not layout.starts.any():
        rows = layout.plan(_rows_of(q.device))
        return varlen_attention(q, *own, rows, rows, scale, causal=True)[0]
    tiles = layout.plan(_chunk_tiles(q.device, q.shape[1] // keys.shape[1], q.dtype))
    return paged_prefill(q, keys, values, tiles, scale, causal=True, scales=scales)


def prompt_tiles(layout: ChunkLayout, heads_per_kv: int, dtype: torch.dtype) -> TileArrays:
    """Cut prompt rows into tiles for heads of a dtype, in the host's memory."""
    found = layout.first_rows, layout.starts, layout.ends
    bounds = zip(*(x.tolist() for x in found), strict=True)
    spans = [Span(first, end - start, start + 1) for first, start, end in bounds]
    widths = (-(-layout.ends // layout.block_size)).tolist()
    return TileArrays.of(layout.tables, spans, widths, heads_per_kv, TILE_ROWS[dtype])


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
    """As reference.branch.branch_attention.

    Each document attends to itself, and all documents of a prefix together to the prefix.  Both are
    merged by their log-sum-exp.
    """
    plan = layout.plan(_branch_plan(q.device))
    own, own_lse = varlen_attention(q, k, v, plan.own, plan.own, scale, causal=True)
    grouped = q.index_select(0, plan.order)
    block_size, heads_per_kv = keys.shape[2], q.shape[1] // keys.shape[1]
    tiles = layout.plan(_prefix_tiles(q.device, block_size, heads_per_kv, q.dtype))
    shared_lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    cached = keys, values, tiles, scale
    shared = paged_prefill(grouped, *cached, causal=False, lse=shared_lse, scales=scales)
    back = shared.index_select(0, plan.inverse), shared_lse.index_select(0, plan.inverse)
    return merge_attention(own, own_lse, *back)


@dataclass(frozen=True, slots=True)
class BranchPlan:
    """own: the documents; order: their rows int64[T], those of one prefix together, and `inverse`
    back."""

    own: Packed
    order: Tensor
    inverse: Tensor


def _rows_of_prefixes(layout: BranchLayout) -> list[tuple[int, int]]:
    """Return the rows of all documents of each prefix, and the length of the prefix."""
    lengths = [branch.length for branch in layout.branches]
    prefixes = np.repeat([branch.prefix for branch in layout.branches], lengths)
    rows = np.bincount(prefixes, minlength=layout.prefix_lengths.size)
    return list(zip(rows.tolist(), layout.prefix_lengths.tolist(), strict=True))


# Cached, so that each is one function, which is what a layout keeps plans by.
@cache
def _rows_of(device: torch.device) -> Callable[[ChunkLayout], Packed]:
    return lambda layout: Packed.of((layout.ends - layout.starts).tolist(), device)


@cache
def _chunk_tiles(
    device: torch.device, heads_per_kv: int, dtype: torch.dtype
) -> Callable[[ChunkLayout], Tiles]:
    return lambda layout: prompt_tiles(layout, heads_per_kv, dtype).on(device)


@cache
def _branch_plan(device: torch.device) -> Callable[[BranchLayout], BranchPlan]:
    def derive(layout: BranchLayout) -> BranchPlan:
        lengths = [branch.length for branch in layout.branches]
        prefixes = np.repeat([branch.prefix for branch in layout.branches], lengths)
        order = np.argsort(prefixes, kind="stable")
        both = [torch.from_numpy(x) for x in (order, np.argsort(order))]
        return BranchPlan(Packed.of(lengths, device), *upload_together(both, device))

    return derive


@cache
def _prefix_tiles(
    device: torch.device, block_size: int, heads_per_kv: int, dtype: torch.dtype
) -> Callable[[BranchLayout], Tiles]:
    def derive(layout: BranchLayout) -> Tiles:
        spans, first = [], 0
        for rows, length in _rows_of_prefixes(layout):
            spans.append(Span(first, rows, length))
            first += rows
        widths = (-(-layout.prefix_lengths // block_size)).tolist()
        cut = TileArrays.of(layout.tables, spans, widths, heads_per_kv, TILE_ROWS[dtype])
        return cut.on(device)

    return derive
