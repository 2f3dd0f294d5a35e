"""Matrix products in FP8 (e4m3): 8-bit weights and rows, each with a scale of its own.

A weight row (an output channel) is divided by its scale, its largest absolute value / 448, and
rounded to e4m3.  So is each activation row before the product, which has been rounded to bfloat16
already.  Sums and scales are FP32.  No row's scale depends on other rows.

On a CPU this only shows what a model makes of it: codes are multiplied as FP32 numbers, which takes
FP32's memory and is slower than FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nightjar.kernels.operands import LinearWeight
from nightjar.kernels.reference.activation import activation as apply_activation

LARGEST = 448.0
"""The largest number of e4m3."""

_LEAST_PEAK = 1e-30  # a row of zeros has a scale too, and 448 / _LEAST_PEAK is finite
_ROWS_AT_ONCE = 1024

PackInner = Callable[[Tensor, Tensor | None], LinearWeight]


@dataclass(frozen=True)
class Fp8Weight(LinearWeight):
    """inner: the codes' numbers, for FP32 rows; scales, bias: float32[out]."""

    inner: LinearWeight
    scales: Tensor
    bias: Tensor | None

    @property
    def rows_dtype(self) -> torch.dtype:
        """As LinearWeight says."""
        return torch.bfloat16

    def linear(self, x: Tensor, activation: str | None, out_dtype: torch.dtype | None) -> Tensor:
        """As LinearWeight says; bfloat16 where no dtype is asked for, rounded at the end."""
        codes, scales = quantised(x.bfloat16())
        y = self.inner.linear(numbers(codes), None, torch.float32)
        y = y * (scales.unsqueeze(1) * self.scales)
        y = y if self.bias is None else y + self.bias
        y = y if activation is None else apply_activation(y, activation)
        return y.to(out_dtype or torch.bfloat16)


def pack(weight: Tensor, bias: Tensor | None, pack_inner: PackInner) -> Fp8Weight:
    """Quantise weight [out, in] by output channel; pack_inner packs a weight for FP32 rows."""
    codes, scales = quantised(weight)
    bias = None if bias is None else bias.float()
    return Fp8Weight(weight.shape[0], pack_inner(numbers(codes), None), scales, bias)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of x [T, K] to FP8; return codes uint8[T, K] and scales float32[T].

    A code is the byte of an e4m3 number, the nearest to x / scale.  A row that is not finite has
    codes of 0 and the scale NaN, so that all that it is multiplied with is NaN.
    """
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    parts = [torch.split(one, _ROWS_AT_ONCE) for one in (x, codes, scales)]
    for rows, found, scale in zip(*parts, strict=True):
        wide = rows.float()
        peaks = wide.abs().amax(-1).clamp_(min=_LEAST_PEAK)
        finite = peaks.isfinite()
        # Tensor over tensor: torch computes number over tensor as a reciprocal times the number.
        inverse = peaks.new_tensor(LARGEST) / peaks
        rounded = (wide * inverse.unsqueeze(-1)).to(torch.float8_e4m3fn)
        found.copy_(rounded.view(torch.uint8).masked_fill_(~finite.unsqueeze(-1), 0))
        scale.copy_((peaks / peaks.new_tensor(LARGEST)).masked_fill_(~finite, torch.nan))
    return codes, scales


def numbers(codes: Tensor) -> Tensor:
    """Return the numbers of codes uint8[...], without their scale: float32[...]."""
    return codes.view(torch.float8_e4m3fn).float()
