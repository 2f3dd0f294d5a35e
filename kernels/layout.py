"""Where the rows of a step stand: host-side plans, built once a step and read by every layer.

Rows are packed: the tokens of all sequences lie one after another, with no padding between.  The
plans cut attention into pieces whose shape depends on one sequence alone (absolute positions, its
own length rounded up, or one cache block), never on its neighbours: a row's sums then run in the
same order whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive prompt rows of one sequence: positions [start, end), whose keys and values, and
    those of every position before them, lie in `blocks`."""

    blocks: Sequence[int]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Chunks that cover the same tiles: attended together.

    blocks: int64[n * blocks], the cache blocks of each chunk up to its last tile, n chunks.
    first: index of the first tile; rows: int64[tiles, n * S], the packed row of every place of
    every tile (where a tile holds a position that is not in the chunk: any of its rows).
    """

    n: int
    blocks: Tensor
    first: int
    rows: Tensor


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Prompt rows, in tiles of S positions: tile i of a sequence is [i * S, (i + 1) * S).

    A tile is always computed whole, against the i + 1 blocks up to its end.  So a row's sums are
    a matter of its position and of the tokens before it, not of how a prompt was cut into chunks
    or how much of it came from the prefix cache.
    rows: T, the number of packed rows; unpad: int64[T], where each of them stands in the groups'
    tiles laid end to end.
    """

    rows: int
    groups: tuple[TileGroup, ...]
    unpad: Tensor

    @staticmethod
    def build(chunks: Sequence[Chunk], block_size: int, device: str = "cpu") -> ChunkLayout:
        """Plan for chunks (each not empty) packed in this order."""
        lengths = np.array([chunk.end - chunk.start for chunk in chunks], dtype=np.int64)
        first_rows = np.cumsum(lengths) - lengths
        buckets: dict[tuple[int, int], list[int]] = {}
        for index, chunk in enumerate(chunks):
            tiles = chunk.start // block_size, -(-chunk.end // block_size)
            buckets.setdefault(tiles, []).append(index)
        unpad = np.empty(int(lengths.sum()), dtype=np.int64)
        groups, base = [], 0
        for (first, last), members in buckets.items():
            n = len(members)
            places = np.arange(first * block_size, last * block_size, dtype=np.int64)
            starts = np.array([chunks[i].start for i in members], dtype=np.int64)[:, None]
            ends = np.array([chunks[i].end for i in members], dtype=np.int64)[:, None]
            rows = np.clip(places, starts, ends - 1) - starts + first_rows[members][:, None]
            # [n, tiles, S] -> [tiles, n, S]: a tile of all members is one call.
            rows = rows.reshape(n, last - first, block_size).transpose(1, 0, 2)
            real = ((places >= starts) & (places < ends)).reshape(n, last - first, block_size)
            real = real.transpose(1, 0, 2)
            unpad[rows[real]] = base + np.flatnonzero(real)
            base += rows.size
            tables = [block for i in members for block in chunks[i].blocks[:last]]
            groups.append(
                TileGroup(
                    n,
                    torch.tensor(tables, dtype=torch.int64, device=device),
                    first,
                    torch.from_numpy(rows.reshape(last - first, -1).copy()).to(device),
                )
            )
        return ChunkLayout(unpad.size, tuple(groups), torch.from_numpy(unpad).to(device))


def padded_length(length: int) -> int:
    """Length that a document's attention is computed at: few distinct shapes, little waste."""
    step = 16 if length <= 128 else 64
    return -(-length // step) * step


@dataclass(frozen=True, slots=True)
class RaggedGroup:
    """Sequences of one padded length, attended in one call.

    rows: int64[n * padded], the packed row of every padded place; a place past the end of its
    sequence repeats the last row, so that it holds finite numbers.
    members: int64[n], which sequences these are.
    """

    padded: int
    rows: Tensor
    members: Tensor


@dataclass(frozen=True, slots=True)
class RaggedLayout:
    """Packed sequences, in groups of one padded length.

    unpad: int64[T], where each packed row stands in the groups' padded rows laid end to end.
    """

    groups: tuple[RaggedGroup, ...]
    unpad: Tensor

    @staticmethod
    def build(
        lengths: Sequence[int],
        padded: Sequence[int],
        keys: Sequence[int] | None = None,
        device: str = "cpu",
    ) -> RaggedLayout:
        """Plan for sequences of these lengths (each >= 1), packed in this order.

        padded: the length that each is attended at, no less than its own.
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
            places = np.arange(wide, dtype=np.int64)
            last = np.array([lengths[i] - 1 for i in members], dtype=np.int64)[:, None]
            rows = starts[members][:, None] + np.minimum(places, last)
            real = places <= last
            unpad[rows[real]] = base + np.flatnonzero(real)
            base += rows.size
            groups.append(
                RaggedGroup(
                    wide,
                    torch.from_numpy(rows.reshape(-1)).to(device),
                    torch.tensor(members, dtype=torch.int64),
                )
            )
        return RaggedLayout(tuple(groups), torch.from_numpy(unpad).to(device))


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """One query row per sequence, against the blocks of its table.

    The (sequence, block) pairs are ordered by block index, then by sequence, with the longest
    sequences first: the pairs of block j are one slice, and merging it into the slices before it
    is an addition of prefixes, in ascending order of position.

    inverse: int64[B], the place of each sequence in that order.
    owners: int64[N], the place of each pair's sequence; steps: int64[N], its index in the table.
    hidden: bool[N, S], whether the position is past the sequence's length.
    counts: how many sequences have a block j, for each j.
    pages: which cache blocks are read, each for one query row.
    page_rows: int64[R], the query row that reads each page (any row where no sequence of this
    step holds it); places: int64[N], the page of each pair.
    """

    inverse: Tensor
    owners: Tensor
    steps: Tensor
    hidden: Tensor
    counts: tuple[int, ...]
    pages: Pages
    page_rows: Tensor
    places: Tensor

    @staticmethod
    def build(
        block_tables: Sequence[Sequence[int]],
        lengths: Sequence[int],
        block_size: int,
        device: str = "cpu",
    ) -> PagedLayout:
        """Plan for sequences of these lengths (each >= 1, the row just written included)."""
        length = np.asarray(lengths, dtype=np.int64)
        n_blocks = -(-length // block_size)
        order = np.argsort(-n_blocks, kind="stable")
        widest = int(n_blocks[order[0]])
        counts = tuple(int((n_blocks > j).sum()) for j in range(widest))
        owners = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
        steps = np.repeat(np.arange(widest, dtype=np.int64), counts)
        pairs = zip(order[owners].tolist(), steps.tolist(), strict=True)
        blocks = np.array([block_tables[row][step] for row, step in pairs], dtype=np.int64)
        valid = length[order][owners] - steps * block_size
        hidden = np.arange(block_size)[None, :] >= valid[:, None]
        pages, places = Pages.plan(blocks, device)
        page_rows = np.zeros(pages.count, dtype=np.int64)
        page_rows[places] = order[owners]
        return PagedLayout(
            inverse=torch.from_numpy(np.argsort(order)).to(device),
            owners=torch.from_numpy(owners).to(device),
            steps=torch.from_numpy(steps).to(device),
            hidden=torch.from_numpy(hidden).to(device),
            counts=counts,
            pages=pages,
            page_rows=torch.from_numpy(page_rows).to(device),
            places=torch.from_numpy(places).to(device),
        )


@dataclass(frozen=True, slots=True)
class Pages:
    """Cache blocks to read: runs of neighbours, read where they lie, then single ones, which are
    copied together.

    A run [low, high) also covers a few blocks that nobody reads: a wasted product costs less than
    a call of its own.  Singles are the second and later readings of a shared block, or all blocks
    where they lie too far apart.
    """

    runs: tuple[tuple[int, int], ...]
    singles: Tensor

    @property
    def count(self) -> int:
        """R, the blocks of all runs and the singles."""
        return sum(high - low for low, high in self.runs) + self.singles.shape[0]

    @staticmethod
    def plan(blocks: np.ndarray, device: str) -> tuple[Pages, np.ndarray]:
        """The pages for blocks int64[N], and the page of each: int64[N]."""
        unique, first = np.unique(blocks, return_index=True)
        cuts = np.flatnonzero(np.diff(unique) > MAX_GAP) + 1
        if cuts.size > unique.size // MIN_RUN:
            return Pages((), torch.from_numpy(blocks).to(device)), np.arange(blocks.size)
        lows = unique[np.concatenate(([0], cuts))]
        highs = unique[np.concatenate((cuts - 1, [-1]))] + 1
        ends = np.cumsum(highs - lows)
        run = np.searchsorted(lows, unique, side="right") - 1
        places = np.empty(blocks.size, dtype=np.int64)
        places[first] = unique - highs[run] + ends[run]
        again = np.ones(blocks.size, dtype=bool)
        again[first] = False
        places[again] = ends[-1] + np.arange(int(again.sum()))
        runs = tuple(zip(lows.tolist(), highs.tolist(), strict=True))
        return Pages(runs, torch.from_numpy(blocks[again]).to(device)), places


MAX_GAP = 4
"""Blocks apart that still share a run."""

MIN_RUN = 8
"""Blocks that a run must hold on average; else one copy of all is cheaper than many calls."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The rows of one document after a prefix.

    length: its rows (>= 1); padded: the length its attention is computed at, which must be a
    matter of the document alone; prefix: index of the prefix that it follows.
    """

    length: int
    padded: int
    prefix: int


@dataclass(frozen=True, slots=True)
class BranchLayout:
    """Packed documents, each attending to itself and to the cached keys of its prefix.

    own: the documents among themselves.
    shared: the same rows grouped by prefix; groups[i] reads prefixes[i].
    prefixes: for each group of `shared`, (block ids int64[n], number of cached tokens).
    """

    own: RaggedLayout
    shared: RaggedLayout
    prefixes: tuple[tuple[Tensor, int], ...]

    @staticmethod
    def build(
        branches: Sequence[Branch],
        block_tables: Sequence[Sequence[int]],
        prefix_lengths: Sequence[int],
        device: str = "cpu",
    ) -> BranchLayout:
        """Plan for documents packed in this order; prefix i lies in block_tables[i]."""
        lengths = [branch.length for branch in branches]
        padded = [branch.padded for branch in branches]
        owners = [branch.prefix for branch in branches]
        own = RaggedLayout.build(lengths, padded, device=device)
        shared = RaggedLayout.build(lengths, padded, keys=owners, device=device)
        tables = [torch.tensor(table, dtype=torch.int64, device=device) for table in block_tables]
        prefixes = []
        for group in shared.groups:
            prefix = owners[int(group.members[0])]
            prefixes.append((tables[prefix], prefix_lengths[prefix]))
        return BranchLayout(own, shared, tuple(prefixes))
