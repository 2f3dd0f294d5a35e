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

    order: int64[B], the sequences by falling block count; inverse: int64[B], its inverse.
    blocks: int64[N], the cache block of each pair; owners: int64[N], its place in `order`.
    mask: float32[N, S], 0 where the position is before the sequence's length, else -inf.
    counts: how many sequences have a block j, for each j.
    """

    order: Tensor
    inverse: Tensor
    blocks: Tensor
    owners: Tensor
    mask: Tensor
    counts: tuple[int, ...]

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
        sorted_counts = n_blocks[order]
        widest = int(sorted_counts[0])
        counts = tuple(int((sorted_counts > j).sum()) for j in range(widest))
        table = np.zeros((len(block_tables), widest), dtype=np.int64)
        for place, index in enumerate(order):
            used = int(n_blocks[index])
            table[place, :used] = block_tables[index][:used]
        owners = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
        steps = np.repeat(np.arange(widest, dtype=np.int64), counts)
        valid = length[order][owners] - steps * block_size
        hidden = np.arange(block_size)[None, :] >= valid[:, None]
        mask = np.where(hidden, np.float32("-inf"), np.float32(0.0))
        return PagedLayout(
            order=torch.from_numpy(order).to(device),
            inverse=torch.from_numpy(np.argsort(order)).to(device),
            blocks=torch.from_numpy(table[owners, steps]).to(device),
            owners=torch.from_numpy(owners).to(device),
            mask=torch.from_numpy(mask).to(device),
            counts=counts,
        )


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
