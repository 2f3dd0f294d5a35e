"""All layers of a decoder in one compiled call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from nightjar.kernels.heads import CacheWrite, Rotation
from nightjar.kernels.layout import PagedTensors, StepRows
from nightjar.kernels.low_rank import AdaptedRows
from nightjar.kernels.native import attention, low_rank, products
from nightjar.kernels.native.attention_arguments import (
    CacheLayer,
    Documents,
    Projection,
    Prompts,
    Running,
)
from nightjar.kernels.native.build import compiled
from nightjar.kernels.native.norm import NormArgument, norm_argument
from nightjar.kernels.native.pointers import FLOAT, INT, POINTER
from nightjar.kernels.native.products import ACTIVATIONS, PanelWeight
from nightjar.kernels.operands import Layers, LayerWeights, Norm


def run_layers(
    layers: Layers,
    count: int,
    residual: Tensor,
    rotation: Rotation | None,
    cache: CacheWrite,
    rows: StepRows,
    adapted: AdaptedRows | None = None,
) -> bool:
    """Run the first `count` layers in one call, if these kernels take their weights.

    The results are bit for bit those of `normed_linear`, `attend`, `linear_onto` and
    `feed_forward_onto` of each layer.
    residual: float32[T, H], the stream, changed; cache: keys and values of all layers, [layers,
    blocks, Hkv, S, D]; rows: all of them wanted; adapted: which of them have adapters.
    Returns whether it was done; if not, nothing was changed.
    """
    native = layers.plan(native_layers)
    if not count or native is None or not native.serves(residual, cache, rows):
        return False
    native.run(count, residual, rotation, cache, rows, adapted)
    return True


def native_layers(layers: Layers) -> NativeLayers | None:
    """Return layers as the compiled kernels take them, or None if they do not."""
    found = [
        layer
        for weights, scale in zip(layers.weights, layers.scales, strict=True)
        if (layer := _native_layer(weights, scale)) is not None
    ]
    kinds = {weight.kernels for layer in found for weight in layer.weights}
    if len(found) < len(layers.weights) or len(kinds) != 1:
        return None
    return NativeLayers(found, layers.activation)


def _native_layer(weights: LayerWeights, scale: float) -> NativeLayer | None:
    """Return one layer: all weights in panels, no post norms, both head norms or none."""
    qkv, out, up, down = weights.qkv, weights.attention_out, weights.up, weights.down
    if weights.attention_post_norm is not None or weights.mlp_post_norm is not None:
        return None
    if not (
        isinstance(qkv, PanelWeight)
        and isinstance(out, PanelWeight)
        and isinstance(up, PanelWeight)
        and isinstance(down, PanelWeight)
    ):
        return None
    head_norms = [norm for norm in (weights.query_norm, weights.key_norm) if norm is not None]
    if len(head_norms) == 1:
        return None
    return NativeLayer(
        weights.attention_norm, qkv, tuple(head_norms), scale, out, weights.mlp_norm, up, down
    )


class LayerShape(NamedTuple):
    """Channels of the residual stream, of the QKV projection, of the attention's result, and of the
    heads' norms, if there are any."""

    stream: int
    projection: int
    attended: int
    head_norms: tuple[int, ...]

    def check(self, residual: Tensor, keys: Tensor) -> None:
        """Check the layers against the stream [T, H] and the cache [layers, blocks, Hkv, S, D].

        Raises:
            ValueError: They do not fit.
        """
        kv_heads, size = keys.shape[2], keys.shape[4]
        heads = self.attended + 2 * kv_heads * size
        fits = self.stream == residual.shape[1] and self.projection == heads
        if not fits or self.attended % size or {*self.head_norms} - {size}:
            raise ValueError(
                f"layers of {self}, a stream {list(residual.shape)}, a cache {list(keys.shape)}"
            )


@dataclass(frozen=True, eq=False)
class NativeLayer:
    """A layer whose weights the kernels take as a whole.

    scale multiplies its scores; head_norms: of queries and keys, or none.
    """

    attention_norm: Norm
    qkv: PanelWeight
    head_norms: tuple[Norm, ...]
    scale: float
    attention_out: PanelWeight
    mlp_norm: Norm
    up: PanelWeight
    down: PanelWeight

    @property
    def weights(self) -> tuple[PanelWeight, ...]:
        """All of them."""
        return self.qkv, self.attention_out, self.up, self.down

    @property
    def shape(self) -> LayerShape:
        """Return what all layers of a decoder have in common.

        Raises:
            ValueError: Its parts do not fit together.
        """
        stream, out = self.qkv.in_features, self.attention_out
        norms = [norm.weight.shape[0] for norm in (self.attention_norm, self.mlp_norm)]
        ends = out.out_features, self.up.in_features, self.down.out_features
        if {*norms, *ends} != {stream}:
            raise ValueError(f"a stream of {stream} channels, but norms {norms} and weights {ends}")
        if self.up.out_features != self.down.in_features:
            up, down = self.up.out_features, self.down.in_features
            raise ValueError(f"{up} channels go up, {down} come down")
        head_norms = tuple(norm.weight.shape[0] for norm in self.head_norms)
        return LayerShape(stream, self.qkv.out_features, out.in_features, head_norms)

    @property
    def argument(self) -> _LayerArgument:
        """As the kernels take it."""
        norms = [norm.plan(norm_argument) for norm in self.head_norms] or [NormArgument()] * 2
        return _LayerArgument(
            self.attention_norm.plan(norm_argument),
            self.qkv.address,
            *norms,
            self.scale,
            self.attention_out.address,
            self.mlp_norm.plan(norm_argument),
            self.up.address,
            self.down.address,
        )


class NativeLayers:
    """Layers of one shape whose weights are all of one kind."""

    def __init__(self, layers: Sequence[NativeLayer], activation: str) -> None:
        """activation: of their feed-forward blocks.

        Raises:
            ValueError: They do not fit together.
        """
        shapes = {layer.shape for layer in layers}
        kinds = {weight.kernels for layer in layers for weight in layer.weights}
        if len(shapes) != 1 or len(kinds) != 1:
            raise ValueError(f"layers of {shapes} with weights of {kinds}: all of one kind")
        (self._shape,), (self._kind,) = shapes, kinds
        self._shapes = np.array([[weight.shape for weight in one.weights] for one in layers])
        self._layers = layers  # the arguments point into these
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
        adapted: AdaptedRows | None,
    ) -> None:
        """See run_layers."""
        keys = cache.keys
        self._shape.check(residual, keys)
        if count > min(len(self._layers), keys.shape[0]) or rows.wanted is not None:
            raise ValueError(
                f"{count} of {len(self._layers)} layers over a cache of {keys.shape[0]}, "
                f"{'all' if rows.wanted is None else rows.wanted.shape[0]} rows wanted: all"
            )
        n_rows, size = residual.shape[0], keys.shape[4]
        qkv = keys.new_empty(n_rows, self._shape.projection // size, size)
        attended = keys.new_empty(n_rows, self._shape.attended // size, size)
        projection = attention.projected(qkv, attended.shape[1], None, rotation, cache)
        _function(self._kind)(
            _LayersArgument(
                self._arguments, count, self._activation, keys.stride(0) * keys.itemsize
            ),
            _StepArgument(residual.data_ptr(), ctypes.pointer(projection), attended.data_ptr()),
            CacheLayer.of(keys[0], cache.values[0]),
            *attention.attending_rows(qkv, attended, cache, rows),
            low_rank.step_argument(adapted, n_rows, self._shapes),
        )


class _LayerArgument(ctypes.Structure):
    """A layer as layers.h takes it."""

    _fields_ = (
        ("attention_norm", NormArgument),
        ("qkv", POINTER),
        ("query_norm", NormArgument),
        ("key_norm", NormArgument),
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
    function.argtypes = [*map(ctypes.POINTER, structures), POINTER]
    function.restype = None
    return function
