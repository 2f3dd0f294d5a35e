"""Weights packed for the compiled products, or for torch's where there are none."""

import torch
from torch import Tensor

from nightjar.kernels.native import float_linear, int8_linear
from nightjar.kernels.operands import NARROW, LinearWeight, Parts, WeightPrecision, Wide
from nightjar.kernels.reference import fp8_linear, half_linear
from nightjar.kernels.reference import packing as reference
from nightjar.kernels.reference.linear import GatedPair


def pack_linear(
    weight: Tensor,
    bias: Tensor | None,
    precision: WeightPrecision = "float",
    wide: Wide = NARROW,
) -> LinearWeight:
    """As reference.packing.pack_linear."""
    if precision == "bfloat16":
        return float_linear.pack(weight, bias, torch.bfloat16)
    if half_linear.is_half(weight, precision):
        return half_linear.pack(weight, bias, pack_linear, wide)
    if precision == "fp8":
        return fp8_linear.pack(weight, bias, pack_linear)
    if precision == "float" and float_linear.serves(weight):
        return float_linear.pack(weight, bias)
    if precision == "int8" and _serves_int8(weight):
        return int8_linear.pack(weight, bias)
    return reference.pack_linear(weight, bias, precision)


def pack_gated(
    gate: Parts, up: Parts, precision: WeightPrecision = "float", wide: Wide = NARROW
) -> LinearWeight:
    """As reference.packing.pack_gated."""
    if precision == "bfloat16":
        return float_linear.pack_gated(gate, up, torch.bfloat16)
    if half_linear.is_half(gate[0], precision):
        return half_linear.pack_gated(gate, up, pack_linear, wide)
    if precision == "float" and float_linear.serves(gate[0]):
        return float_linear.pack_gated(gate, up)
    if precision == "int8" and _serves_int8(gate[0]):
        return int8_linear.pack_gated(gate, up)
    if precision == "fp8":
        pair = pack_linear(*gate, precision), pack_linear(*up, precision)
        return GatedPair(pair[1].out_features, *pair)
    return reference.pack_gated(gate, up, precision)


def copies(weight: Tensor, precision: WeightPrecision) -> bool:
    """Whether a weight of this dtype, in that precision or as it is, is packed into new memory.

    torch's products may keep a weight as it is.
    """
    whole = half_linear.is_half(weight, "float") or float_linear.serves(weight)
    return whole and (precision != "int8" or _serves_int8(weight))


def _serves_int8(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and int8_linear.serves()
