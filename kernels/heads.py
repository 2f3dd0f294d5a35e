"""Records of the work on heads before attention: norms, rotation, cache write."""

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
        """Return cosines and sines of every row, float32[T, n] each; read once for all layers."""
        tables = self.cosines, self.sines
        cosines, sines = (table.index_select(0, self.positions) for table in tables)
        return cosines, sines


@dataclass(frozen=True, slots=True)
class CacheWrite:
    """Where keys and values are written.

    keys, values: [blocks, Hkv, S, D] of one layer, or for `run_layers` of all layers, [layers,
    blocks, Hkv, S, D].  blocks, offsets: int64[C], block and offset of the first C rows.  On a GPU
    a row with block -1 is not written.
    """

    keys: Tensor
    values: Tensor
    blocks: Tensor
    offsets: Tensor
