"""FP16 weights on a CPU: FP16 rounding around FP32 products, as a GPU's tensor cores compute.

Rows and weights are rounded to FP16, sums are in FP32, and results are rounded to FP16 unless they
are wide.  So a precision plan for a GPU can be tried on a CPU.  The weights take FP32's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nightjar.kernels.low_rank import Added
from nightjar.kernels.operands import LinearWeight, Parts, Wide
from nightjar.kernels.reference.activation import activation as apply_activation
from nightjar.kernels.reference.scaled_rows import scaled_rows

PackInner = Callable[[Tensor, Tensor | None], LinearWeight]


@dataclass(frozen=True)
class HalfWeight(LinearWeight):
    """inner: the rounded weight for FP32 rows, without its bias; bias: float32[out] or None."""

    inner: LinearWeight
    bias: Tensor | None
    wide: Wide

    @property
    def rows_dtype(self) -> torch.dtype:
        """As LinearWeight says: FP32 where the rows may not fit into FP16."""
        return torch.float32 if self.wide.rows else torch.float16

    def linear(self, x: Tensor, activation: str | None, out_dtype: torch.dtype | None) -> Tensor:
        """As LinearWeight says; float16, or float32 where results are wide."""
        y = self._rounded(self.product(x))
        if activation is not None:
            y = self._rounded(apply_activation(y, activation))
        return y if out_dtype is None else y.to(out_dtype)

    def linear_onto(self, residual: Tensor, x: Tensor, added: Added | None = None) -> bool:
        """As LinearWeight says, where results are wide."""
        if not self.wide.results or added is not None:
            return False
        residual.add_(self.product(x))
        return True

    def product(self, x: Tensor) -> Tensor:
        """Multiply x [T, in] and add the bias: float32[T, out], not rounded."""
        scale = None
        if x.dtype == torch.float32:
            x, scale = scaled_rows(x)
        y = self.inner.linear(x.float(), None, torch.float32)
        if scale is not None:
            y = y * scale
        return y if self.bias is None else y + self.bias

    def _rounded(self, y: Tensor) -> Tensor:
        return y if self.wide.results else y.half()


@dataclass(frozen=True)
class HalfGatedWeight(LinearWeight):
    """Two weights of one shape: activation(x @ gate) * (x @ up)."""

    gate: HalfWeight
    up: HalfWeight

    @property
    def rows_dtype(self) -> torch.dtype:
        """As LinearWeight says."""
        return self.up.rows_dtype

    def linear(self, x: Tensor, activation: str | None, out_dtype: torch.dtype | None) -> Tensor:
        """As LinearWeight says; float16, or float32 where results are wide."""
        y = self.gate.linear(x, activation, None) * self.up.linear(x, None, None)
        return y if out_dtype is None else y.to(out_dtype)

    def unactivated(self, x: Tensor) -> tuple[Tensor, ...]:
        """As LinearWeight says."""
        return self.gate.linear(x, None, None), self.up.linear(x, None, None)


def pack(weight: Tensor, bias: Tensor | None, pack_inner: PackInner, wide: Wide) -> HalfWeight:
    """Pack weight float16[out, in]; pack_inner packs it for FP32 rows."""
    inner = pack_inner(weight.float(), None)
    return HalfWeight(weight.shape[0], inner, None if bias is None else bias.float(), wide)


def pack_gated(gate: Parts, up: Parts, pack_inner: PackInner, wide: Wide) -> HalfGatedWeight:
    """Pack two weights of one shape as a gated weight."""
    pair = pack(*gate, pack_inner, wide), pack(*up, pack_inner, wide)
    return HalfGatedWeight(pair[1].out_features, *pair)


def is_half(weight: Tensor, precision: str) -> bool:
    """Whether a weight is packed here: FP16 on a CPU."""
    return precision == "float" and weight.dtype == torch.float16 and weight.device.type == "cpu"
