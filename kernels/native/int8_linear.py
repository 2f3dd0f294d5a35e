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
    gated: a panel holds the gates of half as many channels, then what they gate.
    """

    panels: Tensor
    offsets: Tensor
    scales: Tensor
    bias: Tensor
    in_features: int
    out_features: int
    gated: bool = False


def serves() -> bool:
    """Whether this processor multiplies bytes, and the kernel is there."""
    kernels = library()
    return kernels is not None and bool(kernels.int8_linear_works())


def pack(weight: Tensor, bias: Tensor | None) -> PanelWeight:
    """Quantise weight [out, in] by output channel and lay it out in panels."""
    return _in_panels([(weight, bias)])


def pack_gated(gate: tuple[Tensor, Tensor | None], up: tuple[Tensor, Tensor | None]) -> PanelWeight:
    """Two weights [out, in] with their biases, to be computed together: activation(gate) * up."""
    return _in_panels([gate, up])


def int8_linear(x: Tensor, weight: PanelWeight, activation: str | None) -> Tensor:
    """x float32[T, in] times the weight, plus its bias, through the activation (of the gate, where
    there is one): float32[T, out]."""
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
        weight.gated,
    )
    return out


def _in_panels(parts: list[tuple[Tensor, Tensor | None]]) -> PanelWeight:
    """Weights of one shape side by side in every panel."""
    out_features, in_features = parts[0][0].shape
    width, words = COLUMNS // len(parts), -(-in_features // WORD)
    n = -(-out_features // width)
    data, scales, biases = [], [], []
    for weight, bias in parts:
        values, steps = quantize_weight(weight)
        filled = values.new_zeros(n * width, words * WORD)
        filled[:out_features, :in_features] = values
        data.append(filled.view(n, width, words, WORD))
        scales.append(_filled(steps, n, width))
        biases.append(_filled(steps * 0.0 if bias is None else bias.float(), n, width))
    panels = torch.cat(data, 1)
    return PanelWeight(
        panels.transpose(1, 2).contiguous(),
        panels.flatten(2).sum(2, dtype=torch.int32).flatten() * ZERO,
        torch.cat(scales, 1).flatten(),
        torch.cat(biases, 1).flatten(),
        in_features,
        out_features,
        len(parts) == 2,
    )


def _filled(x: Tensor, panels: int, width: int) -> Tensor:
    """x [out] with zeros up to whole panels: [panels, width]."""
    filled = x.new_zeros(panels * width)
    filled[: x.shape[0]] = x
    return filled.view(panels, width)


@cache
def _function() -> ctypes._NamedFuncPointer:
    kernels = library()
    if kernels is None:
        raise RuntimeError("the compiled kernels are not there: ask `serves` first")
    function = kernels.int8_linear
    function.argtypes = (
        [POINTER] + [INT] * 3 + [POINTER] * 2 + [INT] + [POINTER] * 4 + [INT, POINTER, INT, INT]
    )
    function.restype = None
    return function
