"""What is done to the heads of a projection before attention: the records that say it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of query and key heads: float32[D] each."""

    query: Tensor
    key: Tensor
    epsilon: float


@dataclass(frozen=True)
class Rotation:
    """cosines, sines: float32[P, n], n <= D / 2; positions: int64[T]."""

    cosines: Tensor
    sines: Tensor
    positions: Tensor

    @cached_property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every row, two of float32[T, n]: looked up once for all layers."""
        tables = self.cosines, self.sines
        cosines, sines = (table.index_select(0, self.positions) for table in tables)
        return cosines, sines


@dataclass(frozen=True, slots=True)
class CacheWrite:
    """keys, values: [blocks, Hkv, S, D] of one layer, or for `run_layers` those of all, [layers,
    blocks, Hkv, S, D]; blocks, offsets: int64[C], where the first C rows go; a block of -1, on a
    GPU: nowhere."""

    keys: Tensor
    values: Tensor
    blocks: Tensor
    offsets: Tensor
