"""Products with int8 weights, compiled: see reference/int8_linear.py for the arithmetic."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nightjar.kernels.native import norm
from nightjar.kernels.native.build import library
from nightjar.kernels.native.norm import NormArgument
from nightjar.kernels.native.pointers import INT, POINTER
from nightjar.kernels.reference.int8_linear import quantize_weight

if TYPE_CHECKING:
    from nightjar.kernels.norm import Norm

COLUMNS = 64
"""Output channels of a panel; int8_product.h holds their sums in four registers."""

WORD = 4
"""Neighbouring inputs that one instruction multiplies and adds."""

SEGMENT = 16
"""Neighbouring inputs of a quantised row that lie together; inputs are filled up to whole ones."""

CHANNELS_AT_ONCE = 4096
"""Output channels that are quantised together: packing takes little memory beside the weight."""

ZERO = 128
"""What is added to a quantised activation, so that it is stored unsigned."""

INNER_RANGE = 65_504 * 256
"""Largest number between a feed-forward block's products: half precision, scaled.  What is larger
becomes infinite, which the engine finds out and computes again in a higher precision."""

ACTIVATIONS = {None: 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "silu": 4}


@dataclass(frozen=True)
class PanelWeight:
    """A weight ready for `int8_linear`, in panels of COLUMNS output channels.

    panels: int8[n, in / WORD, COLUMNS, WORD], with `in` rounded up to SEGMENT; offsets:
    int32[n * COLUMNS], ZERO times the sum of each channel's weights; scales, bias:
    float32[n * COLUMNS]; all filled up with zeros.
    gated: a panel holds the gates of half as many channels, then what they gate.
    """

    panels: Tensor
    offsets: Tensor
    scales: Tensor
    bias: Tensor
    in_features: int
    out_features: int
    gated: bool = False

    @cached_property
    def argument(self) -> _WeightArgument:
        """The weight as the kernels take it."""
        parts = (self.panels, self.offsets, self.scales, self.bias)
        return _WeightArgument(
            *(part.data_ptr() for part in parts),
            self.in_features,
            self.panels.shape[1] * WORD,
            self.out_features,
            self.gated,
        )


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


def serves_stream(residual: Tensor, delta: Tensor | None) -> bool:
    """Whether `normed_linear` and `feed_forward` take the residual stream [T, H]."""
    return norm.serves(residual, delta, torch.float32)


def int8_linear(x: Tensor, weight: PanelWeight, activation: str | None) -> Tensor:
    """x float32[T, in] times the weight, plus its bias, through the activation (of the gate, where
    there is one): float32[T, out]."""
    if x.shape[1] != weight.in_features or x.dtype != torch.float32:
        raise ValueError(f"{x.dtype}{list(x.shape)}: float32[T, {weight.in_features}]")
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, out = _Rows.for_products(x.shape[0], weight), x.new_empty(x.shape[0], weight.out_features)
    _functions().int8_linear(
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        weight.argument,
        ACTIVATIONS[activation],
        rows.argument,
        out.data_ptr(),
    )
    return out


def normed_linear(
    residual: Tensor, delta: Tensor | None, norm: Norm, weight: PanelWeight
) -> Tensor:
    """As kernels.linear.normed_linear: float32[T, out]."""
    _check_stream(residual, norm, weight)
    rows = _Rows.for_products(residual.shape[0], weight)
    out = residual.new_empty(residual.shape[0], weight.out_features)
    _functions().int8_normed_linear(
        residual.data_ptr(),
        None if delta is None else delta.data_ptr(),
        residual.shape[0],
        NormArgument.of(norm.weight, norm.bias, norm.epsilon),
        weight.argument,
        rows.argument,
        out.data_ptr(),
    )
    return out


def feed_forward(
    residual: Tensor,
    delta: Tensor | None,
    norm: Norm,
    up: PanelWeight,
    down: PanelWeight,
    activation: str,
) -> Tensor:
    """As kernels.linear.feed_forward: float32[T, H].

    Between its two products the rows are in half precision: INNER_RANGE.
    """
    _check_stream(residual, norm, up)
    if down.in_features != up.out_features:
        raise ValueError(f"{up.out_features} channels go up, {down.in_features} come down")
    n_rows = residual.shape[0]
    rows = _Rows.for_products(n_rows, up, down)
    inner = torch.empty(n_rows, up.out_features, dtype=torch.float16)
    out = residual.new_empty(n_rows, down.out_features)
    _functions().int8_feed_forward(
        residual.data_ptr(),
        None if delta is None else delta.data_ptr(),
        n_rows,
        NormArgument.of(norm.weight, norm.bias, norm.epsilon),
        up.argument,
        ACTIVATIONS[activation],
        down.argument,
        rows.argument,
        inner.data_ptr(),
        out.data_ptr(),
    )
    return out


def _check_stream(residual: Tensor, norm: Norm, weight: PanelWeight) -> None:
    width = norm.weight.shape[0]
    if not residual.shape[1] == width == weight.in_features:
        raise ValueError(
            f"rows of {residual.shape[1]}, a norm of {width}, "
            f"a weight of {weight.in_features} inputs"
        )


class _WeightArgument(ctypes.Structure):
    """A weight as int8_product.h takes it."""

    _fields_ = (
        *((name, POINTER) for name in ("panels", "offsets", "scales", "bias")),
        *((name, INT) for name in ("inputs", "stride", "columns", "gated")),
    )


class _RowsArgument(ctypes.Structure):
    """Room for quantised rows, as int8_product.h takes it."""

    _fields_ = (("values", POINTER), ("scales", POINTER))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Room for quantised rows: uint8[T * stride], float32[T]."""

    values: Tensor
    scales: Tensor
    argument: _RowsArgument

    @staticmethod
    def for_products(n_rows: int, *weights: PanelWeight) -> _Rows:
        """Room for the rows of each product in turn."""
        width = max(weight.panels.shape[1] * WORD for weight in weights)
        values = torch.empty(n_rows * width, dtype=torch.uint8)
        scales = torch.empty(n_rows)
        return _Rows(values, scales, _RowsArgument(values.data_ptr(), scales.data_ptr()))


def _in_panels(parts: list[tuple[Tensor, Tensor | None]]) -> PanelWeight:
    """Weights of one shape side by side in every panel."""
    out_features, in_features = parts[0][0].shape
    pieces = []
    for first in range(0, out_features, CHANNELS_AT_ONCE):
        rows = slice(first, first + CHANNELS_AT_ONCE)
        piece = [(weight[rows], None if bias is None else bias[rows]) for weight, bias in parts]
        pieces.append(_panels(piece))
    panels, offsets, scales, biases = (torch.cat(tensors) for tensors in zip(*pieces, strict=True))
    return PanelWeight(
        panels, offsets, scales, biases, in_features, out_features, gated=len(parts) == 2
    )


def _panels(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The panels of some channels, and their offsets, scales and biases, as in PanelWeight."""
    out_features, in_features = parts[0][0].shape
    width, words = COLUMNS // len(parts), -(-in_features // SEGMENT) * SEGMENT // WORD
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
    return (
        panels.transpose(1, 2).contiguous(),
        panels.flatten(2).sum(2, dtype=torch.int32).flatten() * ZERO,
        torch.cat(scales, 1).flatten(),
        torch.cat(biases, 1).flatten(),
    )


def _filled(x: Tensor, panels: int, width: int) -> Tensor:
    """x [out] with zeros up to whole panels: [panels, width]."""
    filled = x.new_zeros(panels * width)
    filled[: x.shape[0]] = x
    return filled.view(panels, width)


@cache
def _functions() -> ctypes.CDLL:
    """The library, with the types of what is called here."""
    kernels = library()
    if kernels is None:
        raise RuntimeError("the compiled kernels are not there: ask `serves` first")
    weight, rows = ctypes.POINTER(_WeightArgument), _RowsArgument
    stream = (POINTER, POINTER, INT, ctypes.POINTER(NormArgument))
    kernels.int8_linear.argtypes = (POINTER, INT, INT, weight, INT, rows, POINTER)
    kernels.int8_normed_linear.argtypes = (*stream, weight, rows, POINTER)
    kernels.int8_feed_forward.argtypes = (*stream, weight, INT, weight, rows, POINTER, POINTER)
    for name in ("int8_linear", "int8_normed_linear", "int8_feed_forward"):
        getattr(kernels, name).restype = None
    return kernels
