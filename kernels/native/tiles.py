"""Cuts rows of prompts and documents into tiles, as the compiled attention takes them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache, cached_property

import numpy as np

from nightjar.kernels.layout import BranchLayout, ChunkLayout
from nightjar.kernels.native.build import compiled
from nightjar.kernels.native.pointers import address


@dataclass(frozen=True)
class ChunkTiles:
    """Prompt rows in tiles: int64[tiles] each, as prefill_attention.h takes them."""

    tables: np.ndarray
    first_rows: np.ndarray
    counts: np.ndarray
    positions: np.ndarray
    table_starts: np.ndarray

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Return the last fields of `Prompts`."""
        tables, *tiles = (address(getattr(self, field.name)) for field in fields(self))
        return tables, self.counts.size, *tiles

    @staticmethod
    def of(layout: ChunkLayout) -> ChunkTiles:
        """Cut every chunk from its beginning on."""
        chunks = np.arange(layout.starts.size)
        return ChunkTiles._of_runs(layout, chunks, layout.first_rows, layout.ends - layout.starts)

    @staticmethod
    def holding(layout: ChunkLayout, wanted: np.ndarray) -> ChunkTiles:
        """Cut only these packed rows: int64[n], ascending."""
        chunks = np.searchsorted(layout.first_rows, wanted, side="right") - 1
        runs = np.flatnonzero((np.diff(wanted, prepend=-2) != 1) | np.diff(chunks, prepend=-1) != 0)
        lengths = np.diff(runs, append=wanted.size)
        return ChunkTiles._of_runs(layout, chunks[runs], wanted[runs], lengths)

    @staticmethod
    def _of_runs(
        layout: ChunkLayout, chunks: np.ndarray, first_rows: np.ndarray, lengths: np.ndarray
    ) -> ChunkTiles:
        """Cut neighbouring rows of a chunk, `lengths` of them from each packed first row on."""
        owners, offsets, counts = _tiles(lengths)
        rows = first_rows[owners] + offsets
        owners = chunks[owners]
        return ChunkTiles(
            layout.tables.blocks,
            rows,
            counts,
            layout.starts[owners] + rows - layout.first_rows[owners],
            layout.tables.starts[owners],
        )


@dataclass(frozen=True)
class BranchTiles:
    """Document rows in tiles: int64[tiles] each, and first_of int64[T], as branch_attention.h takes
    them."""

    tables: np.ndarray
    first_rows: np.ndarray
    counts: np.ndarray
    table_starts: np.ndarray
    prefix_lengths: np.ndarray
    first_of: np.ndarray

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Return the last fields of `Documents`."""
        tables, *tiles = (address(getattr(self, field.name)) for field in fields(self))
        return tables, self.counts.size, *tiles

    @staticmethod
    def of(layout: BranchLayout) -> BranchTiles:
        """Cut documents; neighbours after one prefix share tiles."""
        lengths = np.array([branch.length for branch in layout.branches], dtype=np.int64)
        prefixes = np.array([branch.prefix for branch in layout.branches], dtype=np.int64)
        first_rows = np.cumsum(lengths) - lengths
        runs = np.flatnonzero(np.diff(prefixes, prepend=-1))
        owners, offsets, counts = _tiles(np.add.reduceat(lengths, runs))
        run_prefixes = prefixes[runs][owners]
        return BranchTiles(
            layout.tables.blocks,
            first_rows[runs][owners] + offsets,
            counts,
            layout.tables.starts[run_prefixes],
            layout.prefix_lengths[run_prefixes],
            np.repeat(first_rows, lengths),
        )


def _tiles(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut runs of rows into tiles: the run of each, the row it begins at, and its rows."""
    height = _tile_rows()
    n_tiles = -(-lengths // height)
    owners = np.repeat(np.arange(lengths.size), n_tiles)
    offsets = (np.arange(owners.size) - np.repeat(np.cumsum(n_tiles) - n_tiles, n_tiles)) * height
    return owners, offsets, np.minimum(height, lengths[owners] - offsets)


@cache
def _tile_rows() -> int:
    kernels = compiled()
    return int(kernels.attention_tile_rows())
