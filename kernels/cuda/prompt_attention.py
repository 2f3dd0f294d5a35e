"""Attention of prompts and of documents on a GPU.

Cached keys and values are read where they lie, by a kernel of our own (paged_prefill.py).  Prompts
that are computed whole, and documents, have all their keys beside them: there it is torch's flash
attention over packed sequences.  A row's keys always begin at position 0, and no sum is split.  So
its bits do not depend on how a prompt was cut, nor on the prefix cache.  Only between a step of
whole prompts and other steps may the last bits differ.

A cache in FP8 is gathered once a layer instead, and widened.  For L positions, 2 L Hkv D bytes
are read and 2 L Hkv D s written. The T rows after them take 4 L T Hq D operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.merge import merge_attention
from nightjar.kernels.cuda.paged_prefill import TILE_ROWS, Span, TileArrays, Tiles, paged_prefill
from nightjar.kernels.cuda.varlen import Packed, varlen_attention
from nightjar.kernels.heads import CacheScales
from nightjar.kernels.layout import BranchLayout, ChunkLayout, ChunkTensors, Tables
from nightjar.kernels.reference.fp8_rows import dequantised
from nightjar.kernels.upload import upload_together

GATHERED_BYTES = 1 << 30
"""Bytes of gathered keys and values: the cache takes most of the memory, so the gathered rows of a
step must not grow with its contexts."""

WIDENING_BYTES = 5
"""Bytes that a number in FP8 takes while it is widened: its code, and itself in FP32."""


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
        if scales is not None:
            raise TypeError("a layout on the device serves no cache in FP8: give a ChunkLayout")
        return paged_prefill(q, keys, values, layout, scale, causal=True)
    kept_dtype = keys.dtype if scales is None else q.dtype
    if own is not None and own[0].dtype == kept_dtype and not layout.starts.any():
        rows = layout.plan(_rows_of(q.device))
        return varlen_attention(q, *own, rows, rows, scale, causal=True)[0]
    if scales is None:
        tiles = layout.plan(_chunk_tiles(q.device, q.shape[1] // keys.shape[1], q.dtype))
        return paged_prefill(q, keys, values, tiles, scale, causal=True)
    cache = GatheredCache(keys, values, scales, q.dtype)
    gathers = layout.plan(_chunk_gathers(q.device, keys.shape[2], cache.positions_at_once))
    return _gathered_attention(q, cache, gathers, scale, causal=True)[0]


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
    if scales is None:
        block_size, heads_per_kv = keys.shape[2], q.shape[1] // keys.shape[1]
        tiles = layout.plan(_prefix_tiles(q.device, block_size, heads_per_kv, q.dtype))
        shared_lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        cached = keys, values, tiles
        shared = paged_prefill(grouped, *cached, scale, causal=False, lse=shared_lse)
    else:
        cache = GatheredCache(keys, values, scales, q.dtype)
        gathers = layout.plan(_prefix_gathers(q.device, keys.shape[2], cache.positions_at_once))
        shared, shared_lse = _gathered_attention(grouped, cache, gathers, scale, causal=False)
    back = shared.index_select(0, plan.inverse), shared_lse.index_select(0, plan.inverse)
    return merge_attention(own, own_lse, *back)


@dataclass(frozen=True, slots=True)
class Gather:
    """Sequences whose cached rows are packed at once.

    first: the row that their rows begin at; rows, keys: how both are cut into sequences; blocks,
    offsets: int64[N], the block of each cached row and its offset in it.
    """

    first: int
    rows: Packed
    keys: Packed
    blocks: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True)
class GatheredCache:
    """One layer of the cache, as rows for attention.

    keys, values: [blocks, Hkv, S, D]; scales: of a cache in FP8; dtype: of the query rows.
    """

    keys: Tensor
    values: Tensor
    scales: CacheScales | None
    dtype: torch.dtype

    @property
    def kept_dtype(self) -> torch.dtype:
        """The dtype of gathered rows."""
        return self.keys.dtype if self.scales is None else self.dtype

    @property
    def positions_at_once(self) -> int:
        """Positions whose keys and values may be packed at once."""
        _, kv_heads, _, head_size = self.keys.shape
        widening = 0 if self.scales is None else WIDENING_BYTES  # keys first, then values
        bytes_ = kv_heads * head_size * (2 * self.kept_dtype.itemsize + widening)
        return GATHERED_BYTES // bytes_

    def read(self, gather: Gather) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of a gather: [N, Hkv, D] each."""
        places = gather.blocks, gather.offsets
        keys, values = (x.transpose(1, 2)[places] for x in (self.keys, self.values))
        if self.scales is None:
            return keys, values
        factors = (x.transpose(1, 2)[places] for x in (self.scales.keys, self.scales.values))
        k, v = (dequantised(*x, self.dtype) for x in zip((keys, values), factors, strict=True))
        return k, v


def _gathered_attention(
    q: Tensor,
    cache: GatheredCache,
    gathers: Sequence[Gather],
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """As varlen_attention, to keys and values in the cache."""
    found = [
        varlen_attention(
            q.narrow(0, one.first, sum(one.rows.lengths)),
            *cache.read(one),
            one.rows,
            one.keys,
            scale,
            causal=causal,
        )
        for one in gathers
    ]
    if len(found) == 1:
        return found[0]
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _gathers(
    tables: Tables,
    lengths: Sequence[tuple[int, int]],
    block_size: int,
    most: int,
    device: torch.device,
) -> tuple[Gather, ...]:
    """Consecutive sequences together, (rows, keys) of each, up to `most` positions or one sequence.

    Sequences do not see each other, so no bit depends on where they are cut apart.
    """
    found, first = [], 0
    for begin, end in _cuts([keys for _, keys in lengths], most):
        rows, keys = zip(*lengths[begin:end], strict=True)
        positions = [np.arange(length, dtype=np.int64) for length in keys]
        blocks = [
            tables.table(i, -(-own.size // block_size))[own // block_size]
            for i, own in enumerate(positions, begin)
        ]
        written = np.concatenate(blocks), np.concatenate(positions) % block_size
        on_device = upload_together([torch.from_numpy(x) for x in written], device)
        found.append(Gather(first, Packed.of(rows, device), Packed.of(keys, device), *on_device))
        first += sum(rows)
    return tuple(found)


def _cuts(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive items whose sizes come to `most` together, or of one that is larger."""
    begin, held = 0, 0
    for i, size in enumerate(sizes):
        if i > begin and held + size > most:
            yield begin, i
            begin, held = i, 0
        held += size
    yield begin, len(sizes)


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
def _chunk_gathers(
    device: torch.device, block_size: int, most: int
) -> Callable[[ChunkLayout], tuple[Gather, ...]]:
    def derive(layout: ChunkLayout) -> tuple[Gather, ...]:
        rows, ends = (layout.ends - layout.starts).tolist(), layout.ends.tolist()
        lengths = list(zip(rows, ends, strict=True))
        return _gathers(layout.tables, lengths, block_size, most, device)

    return derive


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


@cache
def _prefix_gathers(
    device: torch.device, block_size: int, most: int
) -> Callable[[BranchLayout], tuple[Gather, ...]]:
    def derive(layout: BranchLayout) -> tuple[Gather, ...]:
        return _gathers(layout.tables, _rows_of_prefixes(layout), block_size, most, device)

    return derive
