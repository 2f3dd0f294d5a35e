"""Products with int8 weights, compiled: see reference/int8_linear.py for the arithmetic."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from nightjar.kernels.native.build import library
from nightjar.kernels.native.pointers import INT, POINTER
from nightjar.kernels.reference.int8_linear import quantize_weight

COLUMNS = 32
"""Output channels of a panel; int8_linear.cpp holds their sums in two registers."""

WORD = 4
"""Neighbouring inputs that one instruction multiplies and adds."""

ZERO = 128
"""What is added to a quantised activation, so that it is stored unsigned."""

ACTIVATIONS = {None: 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "silu": 4}


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """A weight ready for `int8_linear`, in panels of COLUMNS output channels.

    panels: int8[n, in / WORD, COLUMNS, WORD]; offsets: int32[n * COLUMNS], ZERO times the sum of
    each channel's weights; scales, bias: float32[n * COLUMNS]; all filled up with zeros.
    """

    panels: Tensor
    offsets: Tensor
    scales: Tensor
    bias: Tensor
    in_features: int
    out_features: int


def serves() -> bool:
    """Whether this processor multiplies bytes, and the kernel is there."""
    kernels = library()
    return kernels is not None and bool(kernels.int8_linear_works())


def pack(weight: Tensor, bias: Tensor | None) -> PanelWeight:
    """Quantise weight [out, in] by output channel and lay it out in panels."""
    data, scales = quantize_weight(weight)
    out_features, in_features = data.shape
    n, words = -(-out_features // COLUMNS), -(-in_features // WORD)
    filled = data.new_zeros(n * COLUMNS, words * WORD)
    filled[:out_features, :in_features] = data
    return PanelWeight(
        filled.view(n, COLUMNS, words, WORD).transpose(1, 2).contiguous(),
        filled.sum(1, dtype=torch.int32) * ZERO,
        _filled(scales, n),
        _filled(scales.new_zeros(out_features) if bias is None else bias.float(), n),
        in_features,
        out_features,
    )


def int8_linear(x: Tensor, weight: PanelWeight, activation: str | None) -> Tensor:
    """x float32[T, in] times the weight, plus its bias, through the activation: float32[T, out]."""
    if x.shape[1] != weight.in_features or x.dtype != torch.float32:
        raise ValueError(f"{x.dtype}{list(x.shape)}: float32[T, {weight.in_features}]")
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, width = x.shape[0], weight.panels.shape[1] * WORD
    values = torch.empty(rows, width, dtype=torch.uint8)
    row_scales = torch.empty(rows)
    out = torch.empty(rows, weight.out_features)
    _function()(
        x.data_ptr(),
        rows,
        weight.in_features,
        x.stride(0),
        values.data_ptr(),
        row_scales.data_ptr(),
        width,
        weight.panels.data_ptr(),
        weight.offsets.data_ptr(),
        weight.scales.data_ptr(),
        weight.bias.data_ptr(),
        weight.out_features,
        out.data_ptr(),
        ACTIVATIONS[activation],
    )
    return out


def _filled(x: Tensor, panels: int) -> Tensor:
    """x [out] with zeros up to whole panels."""
    filled = x.new_zeros(panels * COLUMNS)
    filled[: x.shape[0]] = x
    return filled


@cache
def _function() -> ctypes._NamedFuncPointer:
    kernels = library()
    if kernels is None:
        raise RuntimeError("the compiled kernels are not there: ask `serves` first")
    function = kernels.int8_linear
    function.argtypes = (
        [POINTER] + [INT] * 3 + [POINTER] * 2 + [INT] + [POINTER] * 4 + [INT, POINTER, INT]
    )
    function.restype = None
    return function
