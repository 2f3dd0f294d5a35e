"""Layers of a decoder one after another, compiled: one call for all of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from torch import Tensor

from nightjar.kernels.heads import CacheWrite, Rotation
from nightjar.kernels.layout import PagedTensors, StepRows
from nightjar.kernels.native import attention, products
from nightjar.kernels.native.attention import CacheLayer, Documents, Projection, Prompts, Running
from nightjar.kernels.native.build import compiled
from nightjar.kernels.native.norm import NormArgument
from nightjar.kernels.native.pointers import FLOAT, INT, POINTER
from nightjar.kernels.native.products import ACTIVATIONS, PanelWeight

if TYPE_CHECKING:
    from nightjar.kernels.norm import Norm


@dataclass(frozen=True, eq=False)
class NativeLayer:
    """A layer whose weights the kernels take as a whole; scale multiplies its scores."""

    attention_norm: Norm
    qkv: PanelWeight
    head_norms: tuple[Norm, Norm] | None
    scale: float
    attention_out: PanelWeight
    mlp_norm: Norm
    up: PanelWeight
    down: PanelWeight

    @property
    def kinds(self) -> set[str]:
        """What the names of its weights' kernels begin with."""
        weights = self.qkv, self.attention_out, self.up, self.down
        return {weight.kernels for weight in weights}

    @property
    def argument(self) -> _LayerArgument:
        """As the kernels take it."""
        query, key = self.head_norms or (None, None)
        return _LayerArgument(
            self.attention_norm.native,
            self.qkv.address,
            None if query is None else query.native.weight,
            None if key is None else key.native.weight,
            self.scale,
            self.attention_out.address,
            self.mlp_norm.native,
            self.up.address,
            self.down.address,
        )


class NativeLayers:
    """Layers whose weights are all of one kind."""

    def __init__(self, layers: Sequence[NativeLayer], activation: str) -> None:
        """activation: of their feed-forward blocks."""
        (self._kind,) = set[str]().union(*(layer.kinds for layer in layers))
        self._layers = layers  # or nobody would hold what the arguments point to
        self._arguments = (_LayerArgument * len(layers))(*(layer.argument for layer in layers))
        self._activation = ACTIVATIONS[activation]

    def serves(self, residual: Tensor, cache: CacheWrite, rows: StepRows) -> bool:
        """Whether the kernels take the stream, the cache of all layers, and the rows."""
        return (
            products.serves_stream(residual, None)
            and attention.serves(cache.keys, cache.keys)
            and not isinstance(rows.decode, PagedTensors)
        )

    def run(
        self,
        count: int,
        residual: Tensor,
        rotation: Rotation | None,
        cache: CacheWrite,
        rows: StepRows,
    ) -> None:
        """As kernels.layers.run_layers."""
        keys, first = cache.keys, self._layers[0]
        kv_heads, size = keys.shape[2], keys.shape[4]
        qkv = keys.new_empty(residual.shape[0], first.qkv.out_features // size, size)
        attended = keys.new_empty(residual.shape[0], qkv.shape[1] - 2 * kv_heads, size)
        projection = attention.projected(qkv, attended.shape[1], None, rotation, cache)
        if first.head_norms is not None:
            projection.epsilon = first.head_norms[0].epsilon
        _function(self._kind)(
            _LayersArgument(
                self._arguments, count, self._activation, keys.stride(0) * keys.itemsize
            ),
            _StepArgument(residual.data_ptr(), ctypes.pointer(projection), attended.data_ptr()),
            CacheLayer.of(keys[0], cache.values[0]),
            *attention.attending_rows(qkv, attended, cache, rows),
        )


class _LayerArgument(ctypes.Structure):
    """A layer as layers.h takes it."""

    _fields_ = (
        ("attention_norm", NormArgument),
        *((name, POINTER) for name in ("qkv", "query_norm", "key_norm")),
        ("scale", FLOAT),
        ("attention_out", POINTER),
        ("mlp_norm", NormArgument),
        *((name, POINTER) for name in ("up", "down")),
    )


class _LayersArgument(ctypes.Structure):
    """Layers as layers.h takes them."""

    _fields_ = (
        ("layers", ctypes.POINTER(_LayerArgument)),
        *((name, INT) for name in ("count", "activation", "cache_bytes")),
    )


class _StepArgument(ctypes.Structure):
    """What a step is computed in, as layers.h takes it."""

    _fields_ = (
        ("residual", POINTER),
        ("projection", ctypes.POINTER(Projection)),
        ("attended", POINTER),
    )


@cache
def _function(kind: str) -> ctypes._NamedFuncPointer:
    function: ctypes._NamedFuncPointer = getattr(compiled(), f"{kind}_layers")
    structures = (_LayersArgument, _StepArgument, CacheLayer, Prompts, Running, Documents)
    function.argtypes = [*map(ctypes.POINTER, structures)]
    function.restype = None
    return function
