"""Weights packed for torch's products."""

from torch import Tensor

from nightjar.kernels.operands import NARROW, LinearWeight, Parts, WeightPrecision, Wide
from nightjar.kernels.reference import fp8_linear, half_linear
from nightjar.kernels.reference.int8_linear import pack_int8
from nightjar.kernels.reference.linear import GatedPair, pack_float


def pack_linear(
    weight: Tensor,
    bias: Tensor | None,
    precision: WeightPrecision = "float",
    wide: Wide = NARROW,
) -> LinearWeight:
    """Pack weight [out, in] for products in that precision; the original may be dropped.

    Raises:
        ValueError: There are no products of that precision for the device or the processor.
    """
    if precision == "bfloat16":
        raise ValueError("torch has no products of bfloat16 for FP32 rows")
    if half_linear.is_half(weight, precision):
        return half_linear.pack(weight, bias, pack_float, wide)
    if precision == "fp8":
        return fp8_linear.pack(weight, bias, pack_float)
    return pack_int8(weight, bias) if precision == "int8" else pack_float(weight, bias)


def pack_gated(
    gate: Parts, up: Parts, precision: WeightPrecision = "float", wide: Wide = NARROW
) -> LinearWeight:
    """Pack two weights of one shape as a gated weight; raises as pack_linear does."""
    if half_linear.is_half(gate[0], precision):
        return half_linear.pack_gated(gate, up, pack_float, wide)
    pair = pack_linear(*gate, precision), pack_linear(*up, precision)
    return GatedPair(pair[1].out_features, *pair)
