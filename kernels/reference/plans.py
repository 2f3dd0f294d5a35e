"""The plans of the torch references: a layout cut into pieces of attention, one call each.

The shape of a piece depends on one sequence alone: on absolute positions, on its own length rounded
up, or on one cache block.  So a row's sums run in the same order whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.layout import BranchLayout, ChunkLayout, PagedLayout


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Chunks that cover the same tiles and are attended together.

    blocks: int64[n * blocks], the cache blocks of each chunk up to its last tile, n chunks.
    first: index of the first tile; rows: int64[tiles, n * S], the packed row of every position of
    every tile (where a tile holds a position that is not in the chunk: any of its rows).
    """

    n: int
    blocks: Tensor
    first: int
    rows: Tensor


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Prompt rows, in tiles of S positions: tile i of a sequence is [i * S, (i + 1) * S).

    A tile is always computed whole, against the i + 1 blocks up to its end.  So a row's sums depend
    only on its position and the tokens before it.  They do not depend on how a prompt was cut into
    chunks, or on the prefix cache.
    unpad: int64[T], the index of each packed row in the groups' tiles one after another.
    """

    groups: tuple[TileGroup, ...]
    unpad: Tensor

    @staticmethod
    def of(layout: ChunkLayout) -> TilePlan:
        """Group the chunks that cover the same tiles."""
        size, first_rows = layout.block_size, layout.first_rows
        buckets: dict[tuple[int, int], list[int]] = {}
        for index in range(layout.starts.size):
            tiles = int(layout.starts[index]) // size, -(-int(layout.ends[index]) // size)
            buckets.setdefault(tiles, []).append(index)
        unpad = np.empty(layout.rows, dtype=np.int64)
        groups, base = [], 0
        for (first, last), members in buckets.items():
            n = len(members)
            positions = np.arange(first * size, last * size, dtype=np.int64)
            starts = layout.starts[members][:, None]
            ends = layout.ends[members][:, None]
            rows = np.clip(positions, starts, ends - 1) - starts + first_rows[members][:, None]
            # [n, tiles, S] -> [tiles, n, S]: a tile of all members is one call.
            rows = rows.reshape(n, last - first, size).transpose(1, 0, 2)
            real = ((positions >= starts) & (positions < ends)).reshape(n, last - first, size)
            real = real.transpose(1, 0, 2)
            unpad[rows[real]] = base + np.flatnonzero(real)
            base += rows.size
            tables = np.concatenate([layout.tables.table(i, last) for i in members])
            flat_rows = torch.from_numpy(rows.reshape(last - first, -1).copy())
            groups.append(TileGroup(n, torch.from_numpy(tables), first, flat_rows))
        return TilePlan(tuple(groups), torch.from_numpy(unpad))


@dataclass(frozen=True, slots=True)
class RaggedGroup:
    """Sequences of one padded length, attended in one call.

    rows: int64[n * padded], the packed row of every padded position.  A position past the end of
    its sequence repeats the last row, so that it holds finite numbers.
    members: int64[n], the indices of these sequences.
    """

    padded: int
    rows: Tensor
    members: Tensor


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """Packed sequences, in groups of one padded length.

    unpad: int64[T], the index of each packed row in the groups' padded rows one after another.
    """

    groups: tuple[RaggedGroup, ...]
    unpad: Tensor

    @staticmethod
    def build(
        lengths: Sequence[int],
        padded: Sequence[int],
        keys: Sequence[int] | None = None,
    ) -> RaggedPlan:
        """Group sequences of these lengths (each >= 1), packed in this order.

        padded: the length to which each is padded, not less than its own.
        keys: sequences with different keys are never put in one group (branch attention groups
        by the shared prefix).
        """
        starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
        buckets: dict[tuple[int, int], list[int]] = {}
        for index, wide in enumerate(padded):
            key = 0 if keys is None else keys[index]
            buckets.setdefault((key, wide), []).append(index)
        unpad = np.empty(sum(lengths), dtype=np.int64)
        groups, base = [], 0
        for (_, wide), members in sorted(buckets.items()):
            positions = np.arange(wide, dtype=np.int64)
            last = np.array([lengths[i] - 1 for i in members], dtype=np.int64)[:, None]
            rows = starts[members][:, None] + np.minimum(positions, last)
            real = positions <= last
            unpad[rows[real]] = base + np.flatnonzero(real)
            base += rows.size
            groups.append(
                RaggedGroup(
                    wide,
                    torch.from_numpy(rows.reshape(-1)),
                    torch.tensor(members, dtype=torch.int64),
                )
            )
        return RaggedPlan(tuple(groups), torch.from_numpy(unpad))


@dataclass(frozen=True, slots=True)
class BranchPlan:
    """Packed documents.

    own: the documents among themselves.
    shared: the same rows grouped by prefix; groups[i] reads prefixes[i].
    prefixes: for each group of `shared`, (block ids int64[n], number of cached tokens).
    """

    own: RaggedPlan
    shared: RaggedPlan
    prefixes: tuple[tuple[Tensor, int], ...]

    @staticmethod
    def of(layout: BranchLayout) -> BranchPlan:
        """Group documents by padded length and by prefix."""
        lengths = [branch.length for branch in layout.branches]
        padded = [branch.padded for branch in layout.branches]
        owners = [branch.prefix for branch in layout.branches]
        own = RaggedPlan.build(lengths, padded)
        shared = RaggedPlan.build(lengths, padded, keys=owners)
        ends = np.append(layout.tables.starts[1:], layout.tables.blocks.size)
        tables = [
            torch.from_numpy(layout.tables.table(i, int(end - start)))
            for i, (start, end) in enumerate(zip(layout.tables.starts, ends, strict=True))
        ]
        prefixes = []
        for group in shared.groups:
            prefix = owners[int(group.members[0])]
            prefixes.append((tables[prefix], int(layout.prefix_lengths[prefix])))
        return BranchPlan(own, shared, tuple(prefixes))


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """One query row per sequence, a block of keys at a time.

    The (sequence, block) pairs are ordered by block index, then by sequence, the longest sequences
    first.  So the pairs of block j are one slice.  To merge it into the slices before it, prefixes
    of the slices are added, in ascending order of position.

    inverse: int64[B], the index of each sequence in that order.
    owners: int64[N], the index of each pair's sequence; steps: int64[N], its index in the table.
    hidden: bool[N, S], whether the position is past the sequence's length.
    counts: how many sequences have a block j, for each j.
    pages: which cache blocks are read, each for one query row.
    page_rows: int64[R], the query row that reads each page (any row where no sequence of this
    step holds it); pair_pages: int64[N], the page of each pair.
    """

    inverse: Tensor
    owners: Tensor
    steps: Tensor
    hidden: Tensor
    counts: tuple[int, ...]
    pages: Pages
    page_rows: Tensor
    pair_pages: Tensor

    @staticmethod
    def of(layout: PagedLayout) -> BlockPlan:
        """Make the pairs of all sequences."""
        length, size = layout.lengths, layout.block_size
        n_blocks = -(-length // size)
        order = np.argsort(-n_blocks, kind="stable")
        widest = int(n_blocks[order[0]])
        counts = tuple(int((n_blocks > j).sum()) for j in range(widest))
        owners = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
        steps = np.repeat(np.arange(widest, dtype=np.int64), counts)
        blocks = layout.tables.blocks[layout.tables.starts[order[owners]] + steps]
        valid = length[order][owners] - steps * size
        hidden = np.arange(size)[None, :] >= valid[:, None]
        pages, pair_pages = Pages.plan(blocks)
        page_rows = np.zeros(pages.count, dtype=np.int64)
        page_rows[pair_pages] = order[owners]
        return BlockPlan(
            inverse=torch.from_numpy(np.argsort(order)),
            owners=torch.from_numpy(owners),
            steps=torch.from_numpy(steps),
            hidden=torch.from_numpy(hidden),
            counts=counts,
            pages=pages,
            page_rows=torch.from_numpy(page_rows),
            pair_pages=torch.from_numpy(pair_pages),
        )


@dataclass(frozen=True, slots=True)
class Pages:
    """Cache blocks to read: runs of neighbours, read in place, then single blocks, copied together.

    A run [low, high) also covers a few unneeded blocks: a wasted product costs less than another
    call.  Singles are the second and later readings of a shared block, or all blocks where they lie
    too far apart.
    """

    runs: tuple[tuple[int, int], ...]
    singles: Tensor

    @property
    def count(self) -> int:
        """R, the blocks of all runs and the singles."""
        return sum(high - low for low, high in self.runs) + self.singles.shape[0]

    @staticmethod
    def plan(blocks: np.ndarray) -> tuple[Pages, np.ndarray]:
        """Return the pages for blocks int64[N], and the page of each: int64[N]."""
        unique, first = np.unique(blocks, return_index=True)
        cuts = np.flatnonzero(np.diff(unique) > MAX_GAP) + 1
        if cuts.size > unique.size // MIN_RUN:
            return Pages((), torch.from_numpy(blocks)), np.arange(blocks.size)
        lows = unique[np.concatenate(([0], cuts))]
        highs = unique[np.concatenate((cuts - 1, [-1]))] + 1
        ends = np.cumsum(highs - lows)
        run = np.searchsorted(lows, unique, side="right") - 1
        pair_pages = np.empty(blocks.size, dtype=np.int64)
        pair_pages[first] = unique - highs[run] + ends[run]
        again = np.ones(blocks.size, dtype=bool)
        again[first] = False
        pair_pages[again] = ends[-1] + np.arange(int(again.sum()))
        runs = tuple(zip(lows.tolist(), highs.tolist(), strict=True))
        return Pages(runs, torch.from_numpy(blocks[again])), pair_pages


MAX_GAP = 4
"""Blocks apart that still share a run."""

MIN_RUN = 2
"""Blocks that a run must hold on average; else one copy of all is cheaper than many calls."""
