"""Matrix products with weights packed once."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from nightjar.kernels.reference.activation import activation as apply_activation
from nightjar.kernels.reference.int8_linear import Int8Weight, int8_linear, pack_int8

__all__ = ["FloatWeight", "Int8Weight", "LinearWeight", "WeightPrecision", "linear", "pack_linear"]

MIN_ROWS = 4
"""Fewer rows are padded to this many: with one row oneDNN takes another path (a matrix-vector
product), whose sums run in another order, and a row's result would depend on its company."""

# Activation -> oneDNN's name for it and its variant.
FUSED = {
    None: ("none", ""),
    "gelu_tanh": ("gelu", "tanh"),
    "gelu": ("gelu", "none"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
}


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """A weight ready for `linear`: data [out, in], blocked for oneDNN where `packed`."""

    data: Tensor
    bias: Tensor | None
    out_features: int
    packed: bool


LinearWeight: TypeAlias = FloatWeight | Int8Weight
"""What `pack_linear` returns and `linear` takes."""

WeightPrecision = Literal["float", "int8"]
"""How products are computed: "float" in the weight's own dtype, "int8" in bytes."""


def pack_linear(
    weight: Tensor, bias: Tensor | None, precision: WeightPrecision = "float"
) -> LinearWeight:
    """Reorder weight [out, in] for the device it is on; the original may be dropped after.

    Raises:
        ValueError: int8 is asked for where there is none.
    """
    if precision == "int8":
        return pack_int8(weight, bias)
    weight = weight.contiguous()
    packed = (
        weight.device.type == "cpu"
        and torch._C._has_mkldnn
        and weight.dtype in (torch.float32, torch.bfloat16)
    )
    data = torch.ops.mkldnn._reorder_linear_weight(weight, None) if packed else weight
    return FloatWeight(data, bias, weight.shape[0], packed)


def linear(x: Tensor, weight: LinearWeight, activation: str | None = None) -> Tensor:
    """x [T, in] times the weight, plus its bias, through the activation if one is named.

    Returns [T, out] in x's dtype.
    """
    if isinstance(weight, Int8Weight):
        return int8_linear(x, weight, activation)
    rows = x.shape[0]
    if rows < MIN_ROWS:
        x = F.pad(x, (0, 0, 0, MIN_ROWS - rows))
    if weight.packed:
        name, variant = FUSED[activation]
        # Fused, the activation also runs over whole vectors only, so that no element's bits
        # depend on where it lies in the tensor.
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, weight.data, weight.bias, name, [], variant
        )
    else:
        y = F.linear(x, weight.data, weight.bias)
        y = y if activation is None else apply_activation(y, activation)
    return y[:rows]
