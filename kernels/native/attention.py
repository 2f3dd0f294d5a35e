"""Attention over the paged cache, compiled: prompts, running texts, documents.

Each row runs its own softmax over its own keys, in pieces that begin at fixed positions of the
sequence.  So a row's bits depend on nothing else in the step.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.layout import BranchLayout, ChunkLayout, PagedLayout
from nightjar.kernels.native.build import compiled, library
from nightjar.kernels.native.pointers import FLOAT, INT, POINTER, address, by_row, is_plain

HEAD_SIZE_STEP = 16
"""Heads are read in whole registers."""


def serves(q: Tensor, cache_keys: Tensor) -> bool:
    """Whether these kernels take rows like q and a cache [blocks, Hkv, S, D]."""
    return (
        is_plain(q)
        and cache_keys.dtype in (torch.float32, torch.float16)
        and cache_keys.shape[-1] % HEAD_SIZE_STEP == 0
        and cache_keys.is_contiguous()
        and library() is not None
    )


def prefill_attention(
    q: Tensor, keys: Tensor, values: Tensor, layout: ChunkLayout, scale: float
) -> Tensor:
    """As reference.prefill: q float32[T, H, D] -> float32[T, H, D]."""
    q, out = by_row(q), q.new_empty(q.shape)
    tiles = layout.plan(ChunkTiles.of)
    _functions().prefill(
        q.data_ptr(),
        q.stride(0),
        q.shape[1],
        *cache_arguments(keys, values),
        address(layout.tables.blocks),
        tiles.first_rows.size,
        address(tiles.first_rows),
        address(tiles.counts),
        address(tiles.positions),
        address(tiles.table_starts),
        scale,
        out.data_ptr(),
    )
    return out


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout, scale: float
) -> Tensor:
    """As reference.decode: q float32[B, H, D] -> float32[B, H, D]."""
    q, out = by_row(q), q.new_empty(q.shape)
    _functions().decode(
        q.data_ptr(),
        q.stride(0),
        *q.shape[:2],
        *cache_arguments(keys, values),
        address(layout.tables.blocks),
        address(layout.tables.starts),
        address(layout.lengths),
        scale,
        out.data_ptr(),
    )
    return out


def branch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: BranchLayout,
    scale: float,
) -> Tensor:
    """As reference.branch: q float32[T, H, D], k and v [T, Hkv, D] -> float32[T, H, D]."""
    q, k, v, out = by_row(q), by_row(k), by_row(v), q.new_empty(q.shape)
    if not q.stride(0) == k.stride(0) == v.stride(0):
        raise ValueError(f"rows of q, k, v lie {q.stride(0)}, {k.stride(0)}, {v.stride(0)} apart")
    tiles = layout.plan(BranchTiles.of)
    _functions().branch(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        q.stride(0),
        q.shape[1],
        *cache_arguments(keys, values),
        address(layout.tables.blocks),
        tiles.first_rows.size,
        address(tiles.first_rows),
        address(tiles.counts),
        address(tiles.table_starts),
        address(tiles.prefix_lengths),
        address(tiles.documents),
        scale,
        out.data_ptr(),
    )
    return out


@dataclass(frozen=True, slots=True)
class ChunkTiles:
    """Prompt rows in tiles: int64[tiles] each, as prefill_attention.cpp takes them."""

    first_rows: np.ndarray
    counts: np.ndarray
    positions: np.ndarray
    table_starts: np.ndarray

    @staticmethod
    def of(layout: ChunkLayout) -> ChunkTiles:
        """Every chunk from its own beginning on."""
        lengths = layout.ends - layout.starts
        owners, offsets, counts = _tiles(lengths)
        return ChunkTiles(
            layout.first_rows[owners] + offsets,
            counts,
            layout.starts[owners] + offsets,
            layout.tables.starts[owners],
        )


@dataclass(frozen=True, slots=True)
class BranchTiles:
    """Document rows in tiles: int64[tiles] each, and documents int64[T], as branch_attention.cpp
    takes them."""

    first_rows: np.ndarray
    counts: np.ndarray
    table_starts: np.ndarray
    prefix_lengths: np.ndarray
    documents: np.ndarray

    @staticmethod
    def of(layout: BranchLayout) -> BranchTiles:
        """Neighbours after one prefix share tiles."""
        lengths = np.array([branch.length for branch in layout.branches], dtype=np.int64)
        prefixes = np.array([branch.prefix for branch in layout.branches], dtype=np.int64)
        first_rows = np.cumsum(lengths) - lengths
        runs = np.flatnonzero(np.diff(prefixes, prepend=-1))
        owners, offsets, counts = _tiles(np.add.reduceat(lengths, runs))
        run_prefixes = prefixes[runs][owners]
        return BranchTiles(
            first_rows[runs][owners] + offsets,
            counts,
            layout.tables.starts[run_prefixes],
            layout.prefix_lengths[run_prefixes],
            np.repeat(first_rows, lengths),
        )


def _tiles(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut runs of rows into tiles: the run of each, the row it begins at, and its rows."""
    height = _functions().tile_rows
    n_tiles = -(-lengths // height)
    owners = np.repeat(np.arange(lengths.size), n_tiles)
    offsets = (np.arange(owners.size) - np.repeat(np.cumsum(n_tiles) - n_tiles, n_tiles)) * height
    return owners, offsets, np.minimum(height, lengths[owners] - offsets)


def cache_arguments(keys: Tensor, values: Tensor) -> tuple[int, ...]:
    """The arguments that say where one layer of the cache lies, and of what numbers it is."""
    half = keys.dtype == torch.float16
    return keys.data_ptr(), values.data_ptr(), half, *keys.shape[1:]


class _Functions:
    """The compiled functions, with their arguments' types."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        paged = [POINTER] * 2 + [INT] * 4 + [POINTER]
        self.prefill = kernels.prefill_attention
        self.prefill.argtypes = (
            [POINTER] + [INT] * 2 + paged + [INT] + [POINTER] * 4 + [FLOAT, POINTER]
        )
        self.decode = kernels.decode_attention
        self.decode.argtypes = [POINTER] + [INT] * 3 + paged + [POINTER] * 2 + [FLOAT, POINTER]
        self.branch = kernels.branch_attention
        self.branch.argtypes = (
            [POINTER] * 3 + [INT] * 2 + paged + [INT] + [POINTER] * 5 + [FLOAT, POINTER]
        )
        for function in (self.prefill, self.decode, self.branch):
            function.restype = None
        self.tile_rows = int(kernels.attention_tile_rows())


@cache
def _functions() -> _Functions:
    kernels = compiled()
    return _Functions(kernels)
