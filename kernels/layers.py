"""Layers of a decoder: their weights, and many of them in one call where the backend has that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from nightjar.kernels.heads import CacheWrite, Rotation
from nightjar.kernels.layout import StepRows
from nightjar.kernels.linear import GatedWeight, LinearWeight, block_panels, followed_by
from nightjar.kernels.native.layers import NativeLayer, NativeLayers
from nightjar.kernels.native.products import PanelWeight
from nightjar.kernels.norm import Norm


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block: attention (qkv packed as query, key, value) and feed-forward.

    up: with its gate where the model's are gated; query and key norm, post norms: where it has
    them.
    """

    attention_norm: Norm
    qkv: LinearWeight
    query_norm: Norm | None
    key_norm: Norm | None
    attention_out: LinearWeight
    attention_post_norm: Norm | None
    mlp_norm: Norm
    up: LinearWeight | GatedWeight
    down: LinearWeight
    mlp_post_norm: Norm | None


@dataclass(frozen=True)
class Layers:
    """Layers that each add their attention, and then their feed-forward block, to the residual
    stream, one after another.

    scales: what each multiplies its scores by; activation: of the feed-forward blocks.
    """

    weights: tuple[LayerWeights, ...]
    scales: tuple[float, ...]
    activation: str

    @cached_property
    def native(self) -> NativeLayers | None:
        """As the compiled kernels take them, if they do."""
        layers = [
            layer
            for weights, scale in zip(self.weights, self.scales, strict=True)
            if (layer := _native(weights, scale)) is not None
        ]
        kinds = {weight.kernels for layer in layers for weight in layer.weights}
        if len(layers) < len(self.weights) or len(kinds) != 1:
            return None
        return NativeLayers(layers, self.activation)


def chained(
    layers: Sequence[LayerWeights], head: LinearWeight
) -> tuple[tuple[LayerWeights, ...], LinearWeight]:
    """The same layers and LM head, each of their weights knowing which a decode step reads next;
    after the head, those of the next step."""
    found = []
    for layer, after in zip(layers, [*(one.qkv for one in layers[1:]), head], strict=True):
        qkv, out, up, down = layer.qkv, layer.attention_out, layer.up, layer.down
        found.append(
            replace(
                layer,
                qkv=followed_by(qkv, out),
                attention_out=followed_by(out, up),
                up=replace(up, up=followed_by(up.up, down))
                if isinstance(up, GatedWeight)
                else followed_by(up, down),
                down=followed_by(down, after),
            )
        )
    return tuple(found), followed_by(head, layers[0].qkv)


def run_layers(
    layers: Layers,
    count: int,
    residual: Tensor,
    rotation: Rotation | None,
    cache: CacheWrite,
    rows: StepRows,
) -> bool:
    """Run the first `count` layers in one call, if the backend can: `normed_linear`, `attend`,
    `linear_onto` and `feed_forward_onto` of each, to the last bit.

    residual: float32[T, H], the stream, changed; cache: keys and values of all layers, [layers,
    blocks, Hkv, S, D]; rows: all of them wanted.  Returns whether it was done; if not, nothing was.
    """
    native = layers.native
    if not count or native is None or not native.serves(residual, cache, rows):
        return False
    native.run(count, residual, rotation, cache, rows)
    return True


def _native(weights: LayerWeights, scale: float) -> NativeLayer | None:
    """A layer as the compiled kernels take it, if they do."""
    block = block_panels(weights.up, weights.down)
    qkv, out = weights.qkv, weights.attention_out
    if weights.attention_post_norm is not None or weights.mlp_post_norm is not None:
        return None
    if block is None or not isinstance(qkv, PanelWeight) or not isinstance(out, PanelWeight):
        return None
    head_norms = [norm for norm in (weights.query_norm, weights.key_norm) if norm is not None]
    if len(head_norms) == 1:
        return None
    return NativeLayer(
        weights.attention_norm, qkv, tuple(head_norms), scale, out, weights.mlp_norm, *block
    )
