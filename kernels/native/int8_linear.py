"""int8 weights for the compiled products: see reference/int8_linear.py for the arithmetic."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nightjar.kernels.native.build import library
from nightjar.kernels.native.pointers import INT, POINTER
from nightjar.kernels.native.products import PanelWeight, by_panel, filled_up
from nightjar.kernels.operands import Parts
from nightjar.kernels.reference.int8_linear import quantize_weight

COLUMNS = 64
"""Output channels of a panel; int8_product.h holds their sums in four registers."""

WORD = 4
"""Neighbouring inputs that one instruction multiplies and adds."""

CHANNELS_AT_ONCE = 4096
"""Output channels that are quantised together, so that packing takes little extra memory."""

ZERO = 128
"""Added to a quantised activation, so that it is stored unsigned."""

INNER_RANGE = 65_504 * 256
"""Largest number between a feed-forward block's products: half precision, scaled.

A larger number becomes infinite.  The engine detects that and computes the request again in a
higher precision.
"""


@dataclass(frozen=True)
class Int8PanelWeight(PanelWeight):
    """A weight ready for `products.linear`, in panels of COLUMNS output channels.

    panels: int8[n, stride / WORD, COLUMNS, WORD]; offsets: int32[n * COLUMNS], -ZERO times the sum
    of each channel's weights; scales, bias: float32[n * COLUMNS]; all padded with zeros.
    In a gated weight a panel holds the gates of half as many channels, then the gated channels.
    Between a feed-forward block's two products the rows are in half precision: INNER_RANGE.
    """

    offsets: Tensor
    scales: Tensor
    bias: Tensor

    @property
    def kernels(self) -> str:
        """As PanelWeight says."""
        return "int8"

    @property
    def panel_width(self) -> int:
        """As PanelWeight says."""
        return COLUMNS // 2 if self.gated else COLUMNS

    @cached_property
    def apart(self) -> PanelWeight:
        """As PanelWeight says."""
        parts = self.panels, self.offsets, self.scales, self.bias
        return Int8PanelWeight(self.bias.numel(), self.in_features, False, *parts)

    def structure(self) -> ctypes.Structure:
        """As PanelWeight says."""
        parts = (self.panels, self.offsets, self.scales, self.bias)
        return _Int8WeightArgument(
            *(part.data_ptr() for part in parts),
            self.in_features,
            self.stride,
            self.out_features,
            self.gated,
        )


def serves() -> bool:
    """Whether this processor multiplies bytes, and the kernel is there."""
    kernels = library()
    return kernels is not None and bool(kernels.int8_linear_works())


def pack(weight: Tensor, bias: Tensor | None) -> Int8PanelWeight:
    """Quantise weight [out, in] by output channel and lay it out in panels."""
    return _in_panels([(weight, bias)])


def pack_gated(gate: Parts, up: Parts) -> Int8PanelWeight:
    """Pack two weights [out, in] with their biases for one product: activation(gate) * up."""
    return _in_panels([gate, up])


class _Int8WeightArgument(ctypes.Structure):
    """A weight as int8_product.h takes it."""

    _fields_ = (
        *((name, POINTER) for name in ("panels", "offsets", "scales", "bias")),
        *((name, INT) for name in ("inputs", "stride", "columns", "gated")),
    )


def _in_panels(parts: list[Parts]) -> Int8PanelWeight:
    """Pack weights of one shape side by side in every panel."""
    out_features, in_features = parts[0][0].shape
    pieces = []
    for first in range(0, out_features, CHANNELS_AT_ONCE):
        rows = slice(first, first + CHANNELS_AT_ONCE)
        piece = [(weight[rows], None if bias is None else bias[rows]) for weight, bias in parts]
        pieces.append(_panels(piece))
    panels, offsets, scales, biases = (torch.cat(tensors) for tensors in zip(*pieces, strict=True))
    return Int8PanelWeight(
        out_features, in_features, len(parts) == 2, panels, offsets, scales, biases
    )


def _panels(parts: list[Parts]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the panels of some channels, with offsets, scales and biases, as in PanelWeight."""
    out_features, in_features = parts[0][0].shape
    width, words = COLUMNS // len(parts), filled_up(in_features, 1) // WORD
    n = -(-out_features // width)
    data, scales, biases = [], [], []
    for weight, bias in parts:
        values, steps = quantize_weight(weight)
        filled = values.new_zeros(n * width, words * WORD)
        filled[:out_features, :in_features] = values
        data.append(filled.view(n, width, words, WORD))
        scales.append(by_panel(steps, n, width))
        biases.append(by_panel(steps * 0.0 if bias is None else bias.float(), n, width))
    panels = torch.cat(data, 1)
    return (
        panels.transpose(1, 2).contiguous(),
        panels.flatten(2).sum(2, dtype=torch.int32).flatten() * -ZERO,
        torch.cat(scales, 1).flatten(),
        torch.cat(biases, 1).flatten(),
    )
