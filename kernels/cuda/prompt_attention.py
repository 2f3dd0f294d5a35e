"""Attention of prompts and of documents on a GPU: torch's flash attention over packed sequences.

What it reads of the paged cache is gathered into packed rows once a layer: 2 L Hkv D s bytes read
and written for L positions, against 4 L T Hq D operations of the T rows behind them.  Prompts that
are computed whole are read where they are.  A row's keys begin at position 0 whatever part of its
prompt is computed now, and no sum is split, so its bits depend neither on how a prompt was cut nor
on the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.merge import merge_attention
from nightjar.kernels.cuda.varlen import Packed, varlen_attention
from nightjar.kernels.layout import BranchLayout, ChunkLayout, Tables


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: ChunkLayout,
    scale: float,
    own: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As kernels.prefill_attention: q [T, Hq, D], cache [blocks, Hkv, S, D] -> [T, Hq, D]."""
    plan = layout.plan(_chunk_plan(q.device, keys.shape[2]))
    if own is None or own[0].dtype != keys.dtype or layout.starts.any():
        own = plan.places.read(keys), plan.places.read(values)
    return varlen_attention(q, *own, plan.rows, plan.keys, scale, causal=True)[0]


def branch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: BranchLayout,
    scale: float,
) -> Tensor:
    """As kernels.branch_attention: each document to itself, then all documents of a prefix
    together to the prefix, and both merged by their log-sum-exp."""
    plan = layout.plan(_branch_plan(q.device, keys.shape[2]))
    own, own_lse = varlen_attention(q, k, v, plan.own, plan.own, scale, causal=True)
    grouped = q.index_select(0, plan.order)
    shared_k, shared_v = plan.places.read(keys), plan.places.read(values)
    shared, shared_lse = varlen_attention(
        grouped, shared_k, shared_v, plan.rows, plan.prefixes, scale, causal=False
    )
    back = shared.index_select(0, plan.inverse), shared_lse.index_select(0, plan.inverse)
    return merge_attention(own, own_lse, *back)


@dataclass(frozen=True, slots=True)
class CachePlaces:
    """Cached rows, packed: blocks, offsets int64[N], the block of each and its place in it."""

    blocks: Tensor
    offsets: Tensor

    @staticmethod
    def of(
        tables: Tables, lengths: Sequence[int], block_size: int, device: torch.device
    ) -> CachePlaces:
        """The first lengths[i] positions of each table."""
        positions = [np.arange(length, dtype=np.int64) for length in lengths]
        blocks = [
            tables.table(i, -(-length // block_size))[own // block_size]
            for i, (length, own) in enumerate(zip(lengths, positions, strict=True))
        ]
        packed = np.concatenate(blocks), np.concatenate(positions) % block_size
        return CachePlaces(*(torch.from_numpy(x).to(device) for x in packed))

    def read(self, cached: Tensor) -> Tensor:
        """Of one layer [blocks, Hkv, S, D]: [N, Hkv, D]."""
        return cached.transpose(1, 2)[self.blocks, self.offsets]


@dataclass(frozen=True)
class ChunkPlan:
    """rows: the chunks; keys: for each, everything up to its end."""

    rows: Packed
    keys: Packed
    tables: Tables
    block_size: int

    @cached_property
    def places(self) -> CachePlaces:
        """Where the keys lie."""
        device = self.keys.starts.device
        return CachePlaces.of(self.tables, self.keys.lengths, self.block_size, device)


@dataclass(frozen=True, slots=True)
class BranchPlan:
    """own: the documents; rows: the same rows in the order `order` int64[T], those of one prefix
    together, and `inverse` back; prefixes: their keys, which lie at `places`."""

    own: Packed
    order: Tensor
    inverse: Tensor
    rows: Packed
    prefixes: Packed
    places: CachePlaces


# Cached, so that each is one function, which is what a layout keeps plans by.
@cache
def _chunk_plan(device: torch.device, block_size: int) -> Callable[[ChunkLayout], ChunkPlan]:
    def derive(layout: ChunkLayout) -> ChunkPlan:
        ends = layout.ends.tolist()
        return ChunkPlan(
            Packed.of((layout.ends - layout.starts).tolist(), device),
            Packed.of(ends, device),
            layout.tables,
            block_size,
        )

    return derive


@cache
def _branch_plan(device: torch.device, block_size: int) -> Callable[[BranchLayout], BranchPlan]:
    def derive(layout: BranchLayout) -> BranchPlan:
        lengths = [branch.length for branch in layout.branches]
        prefixes = np.repeat([branch.prefix for branch in layout.branches], lengths)
        order = np.argsort(prefixes, kind="stable")
        prefix_lengths = layout.prefix_lengths.tolist()
        rows = np.bincount(prefixes, minlength=len(prefix_lengths))
        return BranchPlan(
            Packed.of(lengths, device),
            torch.from_numpy(order).to(device),
            torch.from_numpy(np.argsort(order)).to(device),
            Packed.of(rows.tolist(), device),
            Packed.of(prefix_lengths, device),
            CachePlaces.of(layout.tables, prefix_lengths, block_size, device),
        )

    return derive
