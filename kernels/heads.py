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
class CacheScales:
    """The scales of a cache in FP8, one for each position of a head: see reference/fp8_rows.py.

    The cache itself, [blocks, Hkv, S, D], is uint8 then: bytes of e4m3 numbers.
    keys, values: uint8[blocks, Hkv, S] of one layer; an exponent e is the factor 2 ** (e - 127).
    0 is the factor 0, and 255 is NaN.
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class CacheWrite:
    """Where keys and values are written.

    keys, values: [blocks, Hkv, S, D] of one layer, or for `run_layers` of all layers, [layers,
    blocks, Hkv, S, D].  blocks, offsets: int64[C], block and offset of the first C rows.  On a GPU
    a row with block -1 is not written.  scales: of a cache in FP8, else None.
    """

    keys: Tensor
    values: Tensor
    blocks: Tensor
    offsets: Tensor
    scales: CacheScales | None = None
