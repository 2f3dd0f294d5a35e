"""Operands of LoRA adapters (arXiv 2106.09685): products of low rank, and the rows that they adapt.

An adapter adds products of low rank to projections of a layer.  Several adapters may be in one
step: its rows are grouped by adapter, and each group is multiplied with its own factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.operand import Operand
from nightjar.kernels.upload import upload

BLOCK = 16
"""The ranks of a product are padded with zeros to a multiple of this; its outputs lie in blocks."""


class Place(IntEnum):
    """The projections of a layer, in the order that the kernels count them in."""

    QUERY_KEY_VALUE = 0
    ATTENTION_OUT = 1
    UP = 2
    DOWN = 3


@dataclass(frozen=True, eq=False)
class LowRank(Operand):
    """A product of low rank, x @ down @ up, that is added to some outputs of a projection.

    down: float32[in, rank, padded]; up: float32[rank, blocks, BLOCK], zeros before and after its
    outputs; begin: the first output of the first block.  gated: whether it belongs to the gated
    half of a gated weight, not to its gates.
    """

    down: Tensor
    up: Tensor
    begin: int
    gated: bool = False

    @staticmethod
    def of(down: Tensor, up: Tensor, begin: int = 0, *, gated: bool = False) -> LowRank:
        """down: [rank, in], up: [outputs, rank], as LoRA has them; both are copied.

        begin: the first output that it is added to.
        """
        rank, inputs = down.shape
        outputs, before = up.shape[0], begin % BLOCK
        padded_down = down.new_zeros(inputs, _padded(rank), dtype=torch.float32)
        padded_down[:, :rank] = down.t()
        blocks = _padded(before + outputs) // BLOCK
        # On a CPU a block's factors lie together, as a tile of the projection reads them.
        is_host = up.device.type == "cpu"
        shape = (blocks, rank, BLOCK) if is_host else (rank, blocks, BLOCK)
        padded_up = up.new_zeros(shape, dtype=torch.float32)
        padded_up = padded_up.transpose(0, 1) if is_host else padded_up
        wide = up.new_zeros(rank, blocks * BLOCK, dtype=torch.float32)
        wide[:, before : before + outputs] = up.t()
        padded_up.copy_(wide.view(rank, blocks, BLOCK))
        return LowRank(padded_down, padded_up, begin - before, gated)

    @property
    def rank(self) -> int:
        """The rank, without padding."""
        return self.up.shape[0]


LayerProducts = tuple[tuple[LowRank, ...], ...]
"""A layer's products of low rank, by `Place`."""


@dataclass(frozen=True, eq=False)
class AdapterProducts(Operand):
    """All products of an adapter, by layer."""

    layers: tuple[LayerProducts, ...]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows [begin, end) of a step that are multiplied with the same products of low rank."""

    begin: int
    end: int
    products: tuple[LowRank, ...]


@dataclass(frozen=True, eq=False)
class AdaptedRows(Operand):
    """Which of a step's rows have which adapter, grouped by adapter.

    owners: int64[T], the index of each row's adapter; -1 for a row without one.
    """

    adapters: tuple[AdapterProducts, ...]
    owners: np.ndarray
    device: str = "cpu"

    @cached_property
    def order(self) -> np.ndarray:
        """int64[M], the adapted rows by adapter, ascending within each; on the host."""
        order = np.argsort(self.owners, kind="stable")
        found: np.ndarray = order[np.count_nonzero(self.owners < 0) :]
        return found

    @cached_property
    def starts(self) -> np.ndarray:
        """int64[adapters + 1], where each adapter's rows begin in `order`."""
        return np.searchsorted(self.owners[self.order], np.arange(len(self.adapters) + 1))

    @cached_property
    def rows(self) -> Tensor:
        """`order` on the device."""
        return upload(torch.from_numpy(self.order), self.device)

    @cached_property
    def plain(self) -> Tensor:
        """int64[P], the other rows, ascending."""
        return upload(torch.from_numpy(np.flatnonzero(self.owners < 0)), self.device)

    def to(self, device: str) -> AdaptedRows:
        """Return the same rows on a device."""
        return self if device == self.device else AdaptedRows(self.adapters, self.owners, device)

    def within(self, wanted: Tensor) -> AdaptedRows | None:
        """Return what is adapted of these rows int64[N], counted anew; None for nothing."""
        owners = self.owners[wanted.cpu().numpy()]
        return None if (owners < 0).all() else AdaptedRows(self.adapters, owners, self.device)

    def added(self, layer: int) -> Added:
        """Return what the adapters add to a layer."""
        return Added(self, layer)


@dataclass(frozen=True, slots=True)
class Added:
    """What adapters add to the projections of one layer."""

    rows: AdaptedRows
    layer: int

    def groups(self, place: Place, *, gated: bool = False) -> list[RowGroup]:
        """Return which rows are multiplied with what at a place; rows as in `AdaptedRows.order`."""
        found = []
        for number, adapter in enumerate(self.rows.adapters):
            every = adapter.layers[self.layer][place]
            products = tuple(one for one in every if one.gated == gated)
            begin, end = self.rows.starts[number : number + 2].tolist()
            if products and begin < end:
                found.append(RowGroup(begin, end, products))
        return found

    def gathered(self, x: Tensor) -> Tensor:
        """Return the adapted rows of x [T, in], in FP32 at least: [M, in]."""
        found = x.index_select(0, self.rows.rows)
        return found.to(torch.promote_types(x.dtype, torch.float32))

    def at(self, *places: Place) -> Added | None:
        """Return the same of the adapters that change one of these projections, if any.

        What is computed for a row then depends on its own adapter only.
        """
        chosen = [any(one.layers[self.layer][p] for p in places) for one in self.rows.adapters]
        if not any(chosen):
            return None
        if all(chosen):
            return self
        kept = np.flatnonzero(chosen)
        number = np.full(len(chosen) + 1, -1, dtype=np.int64)
        number[kept] = np.arange(kept.size)
        adapters = tuple(self.rows.adapters[i] for i in kept)
        rows = AdaptedRows(adapters, number[self.rows.owners], self.rows.device)
        return Added(rows, self.layer)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
