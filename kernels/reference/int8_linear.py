"""Matrix products in bytes: int8 weights, and activations that are quantised row by row.

Both sides are symmetric. A weight row (an output channel) is scaled by its largest absolute value
onto -127..127. Each activation row is scaled in the same way before the product. The integer sums
are exact, a scale belongs to one row or one channel, and the rest is elementwise. So a row's result
does not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from nightjar.kernels.operands import LinearWeight
from nightjar.kernels.reference.activation import activate_, vector_buffer

WEIGHT_LIMIT = 127
"""Largest absolute value of a quantised weight."""

MAX_INPUTS = (2**31 - 1) // (255 * WEIGHT_LIMIT)
"""How many products of the largest bytes an int32 can sum up."""

MIN_ROWS = 4
"""Fewer rows are padded to this many, because oneDNN's matrix-vector product is slower."""

TILE_ROWS = 512
"""Rows that are quantised, multiplied and scaled back together.

Their FP32 products are still in the processor's cache when scales and activation are applied.  With
fewer rows, waking the second thread costs more than the cache saves.
"""

# A row of zeros has scale 0; any scale serves for it, but 1 / 0 does not.
_LEAST_PEAK = 1e-30


@dataclass(frozen=True)
class Int8Weight(LinearWeight):
    """data: int8[out, in], blocked for oneDNN.

    scales: float32[out], the size of one step of each channel; zero_points: int64[out], zeros;
    bias: float32[out] or None.  activation_limit: largest absolute value of a quantised
    activation.
    """

    data: Tensor
    scales: Tensor
    zero_points: Tensor
    bias: Tensor | None
    activation_limit: int

    @property
    def rows_dtype(self) -> torch.dtype:
        """As LinearWeight says."""
        return torch.float32

    def linear(self, x: Tensor, activation: str | None, out_dtype: torch.dtype | None) -> Tensor:
        """As LinearWeight says; float32 where no dtype is asked for."""
        y = int8_linear(x.float(), self, activation)
        return y if out_dtype is None else y.to(out_dtype)


def pack_int8(weight: Tensor, bias: Tensor | None) -> Int8Weight:
    """Quantise weight [out, in] by output channel and reorder it for oneDNN.

    Raises:
        ValueError: The weight is not on the CPU, or this build of torch has no oneDNN.
    """
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        raise ValueError(
            f"int8 weights need torch with oneDNN on a CPU, not {weight.device.type}: use bf16"
        )
    data, scales = quantize_weight(weight)
    return Int8Weight(
        data=torch.ops.onednn.qlinear_prepack(data, None),
        scales=scales,
        zero_points=torch.zeros(weight.shape[0], dtype=torch.int64),
        bias=None if bias is None else bias.float(),
        out_features=weight.shape[0],
        activation_limit=activation_limit(),
    )


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weight [out, in] to int8[out, in]; return it with the steps' sizes, float32[out].

    Raises:
        ValueError: A sum over so many inputs could overflow 32 bits.
    """
    if weight.shape[1] > MAX_INPUTS:
        raise ValueError(f"int8 weights of {weight.shape[1]} inputs: at most {MAX_INPUTS}")
    weight = weight.float().contiguous()
    scales = weight.abs().amax(-1, keepdim=True).clamp_(min=_LEAST_PEAK).div_(WEIGHT_LIMIT)
    return (weight / scales).round_().to(torch.int8), scales.flatten()


def int8_linear(x: Tensor, weight: Int8Weight, activation: str | None) -> Tensor:
    """Multiply x float32[T, in] by the weight, as `linear` does: float32[T, out]."""
    if x.shape[0] <= TILE_ROWS:
        return _tile(x, weight, activation)
    out = x.new_empty(x.shape[0], weight.out_features)
    for rows, found in zip(torch.split(x, TILE_ROWS), torch.split(out, TILE_ROWS), strict=True):
        found.copy_(_tile(rows, weight, activation))
    return out


def quantize_rows(x: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Scale each row by its largest absolute value onto -limit..limit.

    x: float32[T, K].  Returns the rounded values plus limit + 1, uint8[T, K], because oneDNN's fast
    path takes unsigned activations; and the size of one step of each row, float32[T, 1].
    A row that holds a NaN or an infinity gets a scale that is not finite.
    """
    peaks = x.abs().amax(-1, keepdim=True).clamp_(min=_LEAST_PEAK)
    # Tensor over tensor: torch computes number over tensor as a reciprocal times the number.
    values = (x * (peaks.new_tensor(limit) / peaks)).round_().to(torch.int8)
    # Bytes wrap: the two's complement of a negative value plus limit + 1 is the sum itself.
    return values.view(torch.uint8).add_(limit + 1), peaks / limit


@cache
def activation_limit() -> int:
    """Return the largest quantised activation with exact sums on this processor: 127 or 63.

    Processors without VNNI (before 2019, and many with only AVX2) add the products of two
    neighbouring bytes in 16 bits, which saturate: 2 * 255 * 127 is too much, 2 * 127 * 127 is not.
    A product of the largest values shows it.
    """
    limit = 127
    weight = torch.full((16, 64), WEIGHT_LIMIT, dtype=torch.int8)
    rows = torch.full((MIN_ROWS, 64), 2 * limit + 1, dtype=torch.uint8)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    zero_points = torch.zeros(16, dtype=torch.int64)
    found = _product(rows, packed, torch.ones(16), zero_points, limit + 1)
    return limit if bool((found == 64.0 * limit * WEIGHT_LIMIT).all()) else limit // 2


def _tile(x: Tensor, weight: Int8Weight, activation: str | None) -> Tensor:
    """int8_linear of a few rows."""
    rows = x.shape[0]
    if rows < MIN_ROWS:
        x = torch.nn.functional.pad(x, (0, 0, 0, MIN_ROWS - rows))
    limit = weight.activation_limit
    values, scales = quantize_rows(x, limit)
    y = _product(values, weight.data, weight.scales, weight.zero_points, limit + 1)
    if activation is None:
        y.mul_(scales)
        return (y if weight.bias is None else y.add_(weight.bias))[:rows]
    buffer = vector_buffer(y.numel(), y.device)
    y = torch.mul(y, scales, out=buffer[: y.numel()].view(y.shape))
    if weight.bias is not None:
        y.add_(weight.bias)
    activate_(buffer, activation)
    return y[:rows]


def _product(
    values: Tensor, data: Tensor, scales: Tensor, zero_points: Tensor, zero: int
) -> Tensor:
    """(values - zero) @ data.T * scales, the sums in int32: uint8[T, in] -> float32[T, out]."""
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        values, 1.0, zero, data, scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y
