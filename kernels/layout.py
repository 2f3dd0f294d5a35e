"""Layouts: where the rows of a step are in the cache, for the attention of every backend.

Rows are packed: the tokens of all sequences lie one after another, without padding.  A layout is
built once a step and read by every layer.  It keeps what a backend derives from it
(`Operand.plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.operand import Operand
from nightjar.kernels.upload import upload_together


@dataclass(frozen=True, slots=True)
class Tables:
    """Block tables one after another.

    blocks: int64[N], the cache blocks; starts: int64[n], where each table begins.
    """

    blocks: np.ndarray
    starts: np.ndarray

    @staticmethod
    def build(tables: Sequence[Sequence[int]]) -> Tables:
        """The tables of n sequences."""
        counts = np.array([len(table) for table in tables], dtype=np.int64)
        blocks = np.fromiter(chain.from_iterable(tables), np.int64, int(counts.sum()))
        return Tables(blocks, np.cumsum(counts) - counts)

    def table(self, index: int, length: int) -> np.ndarray:
        """The first `length` blocks of one table."""
        start = int(self.starts[index])
        blocks: np.ndarray = self.blocks[start : start + length]
        return blocks


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive prompt rows of one sequence: positions [start, end).

    Their keys and values, and those of all positions before them, lie in `blocks`.
    """

    blocks: Sequence[int]
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class ChunkLayout(Operand):
    """Prompt rows in chunks, packed in this order.

    starts, ends: int64[n], the positions of each chunk; tables: the n block tables, of blocks of
    block_size tokens.
    """

    tables: Tables
    starts: np.ndarray
    ends: np.ndarray
    block_size: int

    @staticmethod
    def build(chunks: Sequence[Chunk], block_size: int) -> ChunkLayout:
        """Layout of chunks, each not empty."""
        return ChunkLayout(
            Tables.build([chunk.blocks for chunk in chunks]),
            np.array([chunk.start for chunk in chunks], dtype=np.int64),
            np.array([chunk.end for chunk in chunks], dtype=np.int64),
            block_size,
        )

    @property
    def rows(self) -> int:
        """T, the number of packed rows."""
        return int((self.ends - self.starts).sum())

    @property
    def first_rows(self) -> np.ndarray:
        """int64[n], the packed row that each chunk begins at."""
        lengths = self.ends - self.starts
        rows: np.ndarray = np.cumsum(lengths) - lengths
        return rows


@dataclass(frozen=True, slots=True)
class ChunkTensors:
    """A ChunkLayout on the device, in the tiles of its kernel.

    rows: T, rows without a chunk at the end included; their attention is undefined.
    tables: int32[n, W], spans: int32[n, 3], tiles: int32[M, 2]: see kernels/cuda/paged_prefill.py.
    """

    rows: int
    tables: Tensor
    spans: Tensor
    tiles: Tensor


@dataclass(frozen=True, eq=False)
class PagedLayout(Operand):
    """One query row per sequence, against the blocks of its table.

    tables: of the B sequences, blocks of block_size tokens; lengths: int64[B], each >= 1, the row
    just written included.
    """

    tables: Tables
    lengths: np.ndarray
    block_size: int

    @staticmethod
    def build(
        block_tables: Sequence[Sequence[int]], lengths: Sequence[int], block_size: int
    ) -> PagedLayout:
        """Layout of sequences of these lengths."""
        length = np.array(lengths, dtype=np.int64)
        return PagedLayout(Tables.build(block_tables), length, block_size)

    def listed(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tables int32[B, W], as many blocks as each length needs, and int32[B]."""
        counts = -(-self.lengths // self.block_size)
        tables = np.zeros((counts.size, int(counts.max())), dtype=np.int32)
        for row, count in enumerate(counts.tolist()):
            tables[row, :count] = self.tables.table(row, count)
        return tables, self.lengths.astype(np.int32)

    def on(self, device: torch.device) -> PagedTensors:
        """Return the layout for kernels that read it on the device."""
        return self.plan(_paged_on(device))


@dataclass(frozen=True, slots=True)
class PagedTensors:
    """A PagedLayout on the device.

    tables: int32[B, W], the blocks of each sequence, as many as its length needs; lengths:
    int32[B], 0 for a slot without a sequence.
    """

    tables: Tensor
    lengths: Tensor

    def on(self, device: torch.device) -> PagedTensors:
        """Return this layout if it is on that device.

        Raises:
            ValueError: It is on another device.
        """
        if self.lengths.device != device:
            raise ValueError(f"the layout is on {self.lengths.device}, the rows on {device}")
        return self


@cache
def _paged_on(device: torch.device) -> Callable[[PagedLayout], PagedTensors]:
    """Return the function that copies a layout to the device; one per device, for Operand.plan."""

    def derive(layout: PagedLayout) -> PagedTensors:
        found = [torch.from_numpy(x) for x in layout.listed()]
        return PagedTensors(*upload_together(found, device))

    return derive


@dataclass(frozen=True, slots=True)
class Branch:
    """The rows of one document after a prefix.

    length: its rows (>= 1).  padded: the length of its attention in a backend that pads; it depends
    only on the document.  prefix: index of the prefix before it.
    """

    length: int
    padded: int
    prefix: int


@dataclass(frozen=True, eq=False)
class BranchLayout(Operand):
    """Packed documents, each attending to itself and to the cached keys of its prefix.

    tables, prefix_lengths: int64[P], the cached prefixes; branches: the documents, packed in this
    order.
    """

    tables: Tables
    prefix_lengths: np.ndarray
    branches: tuple[Branch, ...]

    @staticmethod
    def build(
        branches: Sequence[Branch],
        block_tables: Sequence[Sequence[int]],
        prefix_lengths: Sequence[int],
    ) -> BranchLayout:
        """Layout of documents; prefix i lies in block_tables[i]."""
        lengths = np.array(prefix_lengths, dtype=np.int64)
        return BranchLayout(Tables.build(block_tables), lengths, tuple(branches))


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of a step: prompt rows, then running sequences, then documents; None for no rows.

    wanted: int64[N], ascending, the rows whose attention is read; None for all.  They include every
    row of running sequences and documents.
    """

    prefill: ChunkLayout | ChunkTensors | None
    decode: PagedLayout | PagedTensors | None
    branch: BranchLayout | None
    wanted: Tensor | None = None

    @cached_property
    def prefill_rows(self) -> int:
        """How many of the first rows are prompt rows."""
        return self.prefill.rows if self.prefill is not None else 0


def padded_length(length: int) -> int:
    """Return the length to which a backend pads a document: few shapes, little waste."""
    step = 16 if length <= 128 else 64
    return -(-length // step) * step
