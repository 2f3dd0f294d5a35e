"""Matrix products in floating point, with weights packed once."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nightjar.kernels.reference.activation import activation as apply_activation

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
    """A weight ready for `linear`: data [out, in], blocked for oneDNN where `packed`; following:
    what a decode step reads after it, where that is known and of use."""

    data: Tensor
    bias: Tensor | None
    out_features: int
    packed: bool
    following: tuple[Tensor, ...] = ()

    @property
    def factor(self) -> tuple[Tensor, Tensor | None]:
        """Data and bias."""
        return self.data, self.bias


def pack_float(weight: Tensor, bias: Tensor | None, blocked: bool = True) -> FloatWeight:
    """Reorder weight [out, in] for the device it is on; the original may be dropped after.

    blocked: for oneDNN where that serves it; else the rows stay as they are."""
    weight = weight.contiguous()
    packed = (
        blocked
        and weight.device.type == "cpu"
        and torch._C._has_mkldnn
        and weight.dtype in (torch.float32, torch.bfloat16)
    )
    data = torch.ops.mkldnn._reorder_linear_weight(weight, None) if packed else weight
    return FloatWeight(data, bias, weight.shape[0], packed)


def float_linear(x: Tensor, weight: FloatWeight, activation: str | None) -> Tensor:
    """x [T, in] times the weight, as `kernels.linear` says: [T, out] in x's dtype."""
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
