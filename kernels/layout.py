"""Where the rows of a step stand: host-side plans, built once a step and read by every layer.

Rows are packed: the tokens of all sequences lie one after another, with no padding between.  The
plans cut attention into pieces whose shape depends on one sequence alone (its own length, rounded
up, or one cache block), never on its neighbours: a row's sums then run in the same order whatever
else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def padded_length(length: int) -> int:
    """Length that attention is computed at: few distinct shapes, little waste."""
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
    """Packed sequences, each attending to itself.

    unpad: int64[T], where each packed row stands in the groups' padded rows laid end to end.
    """

    lengths: tuple[int, ...]
    groups: tuple[RaggedGroup, ...]
    unpad: Tensor

    @property
    def rows(self) -> int:
        """T, the number of packed rows."""
        return sum(self.lengths)

    @staticmethod
    def build(
        lengths: Sequence[int], keys: Sequence[int] | None = None, device: str = "cpu"
    ) -> RaggedLayout:
        """Plan for sequences of these lengths (each >= 1), packed in this order.

        keys: sequences with different keys are never put in one group (branch attention groups
        by the shared prefix).
        """
        starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
        buckets: dict[tuple[int, int], list[int]] = {}
        for index, length in enumerate(lengths):
            key = 0 if keys is None else keys[index]
            buckets.setdefault((key, padded_length(length)), []).append(index)
        unpad = np.empty(sum(lengths), dtype=np.int64)
        groups, base = [], 0
        for (_, padded), members in sorted(buckets.items()):
            places = np.arange(padded, dtype=np.int64)
            last = np.array([lengths[i] - 1 for i in members], dtype=np.int64)[:, None]
            rows = starts[members][:, None] + np.minimum(places, last)
            real = places <= last
            unpad[rows[real]] = base + np.flatnonzero(real)
            base += rows.size
            groups.append(
                RaggedGroup(
                    padded,
                    torch.from_numpy(rows.reshape(-1)).to(device),
                    torch.tensor(members, dtype=torch.int64),
                )
            )
        return RaggedLayout(tuple(lengths), tuple(groups), torch.from_numpy(unpad).to(device))


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """One query row per sequence, against the blocks of its table.

    The (sequence, block) pairs are ordered by block index, then by sequence, with the longest
    sequences first: the pairs of block j are one slice, and merging it into the slices before it
    is an addition of prefixes, in ascending order of position.

    inverse: int64[B], the place of each sequence in that order.
    owners: int64[N], the place of each pair's sequence; steps: int64[N], its index in the table.
    mask: float32[N, S], 0 where the position is before the sequence's length, else -inf.
    counts: how many sequences have a block j, for each j.
    pages: the cache blocks to read, as a slice where they lie close together (no copy), else as
    int64[R].  page_rows: int64[R], the query row that reads each page (any row where no sequence
    of this step holds it); places: int64[N], the page of each pair.
    """

    inverse: Tensor
    owners: Tensor
    steps: Tensor
    mask: Tensor
    counts: tuple[int, ...]
    pages: slice | Tensor
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
        pages, page_rows, places = _pages(blocks, order[owners])
        return PagedLayout(
            inverse=torch.from_numpy(np.argsort(order)).to(device),
            owners=torch.from_numpy(owners).to(device),
            steps=torch.from_numpy(steps).to(device),
            mask=torch.from_numpy(np.where(hidden, np.float32("-inf"), np.float32(0))).to(device),
            counts=counts,
            pages=pages if isinstance(pages, slice) else torch.from_numpy(pages).to(device),
            page_rows=torch.from_numpy(page_rows).to(device),
            places=torch.from_numpy(places).to(device),
        )


def _pages(
    blocks: np.ndarray, rows: np.ndarray
) -> tuple[slice | np.ndarray, np.ndarray, np.ndarray]:
    """How to read these blocks of the cache: pages, page_rows and places of a PagedLayout.

    A slice costs work for the blocks inside it that nobody here holds, a gather costs a copy of
    every block; products over at most twice the pages are the cheaper.
    """
    low, high = int(blocks.min()), int(blocks.max()) + 1
    if high - low > 2 * blocks.size:
        return blocks, rows, np.arange(blocks.size, dtype=np.int64)
    page_rows = np.zeros(high - low, dtype=np.int64)
    page_rows[blocks - low] = rows
    return slice(low, high), page_rows, blocks - low


@dataclass(frozen=True, slots=True)
class BranchLayout:
    """Packed documents, each attending to itself and to the cached keys of its query.

    own: the documents among themselves.
    shared: the same rows grouped by query; groups[i] reads prefixes[i].
    prefixes: for each group of `shared`, (block ids int64[n], number of cached tokens).
    """

    own: RaggedLayout
    shared: RaggedLayout
    prefixes: tuple[tuple[Tensor, int], ...]

    @staticmethod
    def build(
        lengths: Sequence[int],
        owners: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        prefix_lengths: Sequence[int],
        device: str = "cpu",
    ) -> BranchLayout:
        """Plan for documents of these lengths; document i belongs to query owners[i]."""
        own = RaggedLayout.build(lengths, device=device)
        shared = RaggedLayout.build(lengths, keys=owners, device=device)
        tables = [torch.tensor(table, dtype=torch.int64, device=device) for table in block_tables]
        prefixes = []
        for group in shared.groups:
            query = owners[int(group.members[0])]
            prefixes.append((tables[query], prefix_lengths[query]))
        return BranchLayout(own, shared, tuple(prefixes))
