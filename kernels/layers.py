"""The order in which a decode step reads the weights of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nightjar.kernels.operands import LayerWeights, LinearWeight


def chained(
    layers: Sequence[LayerWeights], head: LinearWeight
) -> tuple[tuple[LayerWeights, ...], LinearWeight]:
    """Return the layers and the LM head with weights that know which weights are read next.

    After the LM head, the next decode step reads the first layer.
    """
    found = []
    for layer, after in zip(layers, [*(one.qkv for one in layers[1:]), head], strict=True):
        qkv, out, up, down = layer.qkv, layer.attention_out, layer.up, layer.down
        found.append(
            replace(
                layer,
                qkv=qkv.followed_by(out),
                attention_out=out.followed_by(up),
                up=up.followed_by(down),
                down=down.followed_by(after),
            )
        )
    return tuple(found), head.followed_by(layers[0].qkv)
