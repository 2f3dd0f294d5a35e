"""Matrix products in floating point, with weights packed once."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nightjar.kernels.operands import LinearWeight
from nightjar.kernels.reference.activation import activation as apply_activation

MIN_ROWS = 4
"""Fewer rows are padded to this many.

For one row oneDNN takes a matrix-vector product, whose sums run in another order.  So a row's
result would depend on the number of rows.
"""

BFLOAT_ROWS = 32
"""Rows of every product of bfloat16.

On processors with AMX, oneDNN chooses how it cuts the sums by the number of rows.  Only products of
one shape are cut alike.
"""

# Activation -> oneDNN's name for it and its variant.
FUSED = {
    None: ("none", ""),
    "gelu_tanh": ("gelu", "tanh"),
    "gelu": ("gelu", "none"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
}


@dataclass(frozen=True)
class FloatWeight(LinearWeight):
    """data: [out, in], blocked for oneDNN where `packed`."""

    data: Tensor
    bias: Tensor | None
    packed: bool

    @property
    def rows_dtype(self) -> torch.dtype:
        """As LinearWeight says."""
        return self.data.dtype

    def linear(self, x: Tensor, activation: str | None, out_dtype: torch.dtype | None) -> Tensor:
        """As LinearWeight says."""
        y = float_linear(x, self, activation)
        return y if out_dtype is None else y.to(out_dtype)


@dataclass(frozen=True)
class GatedPair(LinearWeight):
    """Two weights of one shape, each with a product of its own."""

    gate: LinearWeight
    up: LinearWeight

    @property
    def rows_dtype(self) -> torch.dtype:
        """As LinearWeight says."""
        return self.up.rows_dtype

    def linear(self, x: Tensor, activation: str | None, out_dtype: torch.dtype | None) -> Tensor:
        """As LinearWeight says."""
        y = self.gate.linear(x, activation, None).mul_(self.up.linear(x, None, None))
        return y if out_dtype is None else y.to(out_dtype)

    def unactivated(self, x: Tensor) -> tuple[Tensor, ...]:
        """As LinearWeight says."""
        return self.gate.linear(x, None, None), self.up.linear(x, None, None)


def pack_float(weight: Tensor, bias: Tensor | None) -> FloatWeight:
    """Pack weight [out, in] for oneDNN where that takes it; the original may be dropped."""
    weight = weight.contiguous()
    packed = (
        weight.device.type == "cpu"
        and torch._C._has_mkldnn
        and weight.dtype in (torch.float32, torch.bfloat16)
    )
    data = torch.ops.mkldnn._reorder_linear_weight(weight, None) if packed else weight
    return FloatWeight(weight.shape[0], data, bias, packed)


def float_linear(x: Tensor, weight: FloatWeight, activation: str | None) -> Tensor:
    """Multiply x [T, in] by the weight, as `kernels.linear` does: [T, out] in x's dtype."""
    rows = x.shape[0]
    if weight.packed and x.dtype == torch.bfloat16:
        x = F.pad(x, (0, 0, 0, -rows % BFLOAT_ROWS))
        parts = [_packed_linear(part, weight, activation) for part in torch.split(x, BFLOAT_ROWS)]
        return torch.cat(parts)[:rows]
    if rows < MIN_ROWS:
        x = F.pad(x, (0, 0, 0, MIN_ROWS - rows))
    if weight.packed:
        return _packed_linear(x, weight, activation)[:rows]
    y = F.linear(x, weight.data, weight.bias)
    return (y if activation is None else apply_activation(y, activation))[:rows]


def _packed_linear(x: Tensor, weight: FloatWeight, activation: str | None) -> Tensor:
    # A fused activation runs over whole vectors only, so that no element's bits depend on its
    # position in the tensor.
    name, variant = FUSED[activation]
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.data, weight.bias, name, [], variant)
    return y
