"""Matrix products with weights packed once, in floating point or in bytes."""

from typing import Literal, TypeAlias

from torch import Tensor

from nightjar.kernels import native
from nightjar.kernels.native.int8_linear import PanelWeight
from nightjar.kernels.reference.int8_linear import Int8Weight, int8_linear, pack_int8
from nightjar.kernels.reference.linear import FloatWeight, float_linear, pack_float

LinearWeight: TypeAlias = FloatWeight | Int8Weight | PanelWeight
"""What `pack_linear` returns and `linear` takes."""

WeightPrecision = Literal["float", "int8"]
"""How products are computed: "float" in the weight's own dtype, "int8" in bytes."""


def pack_linear(
    weight: Tensor, bias: Tensor | None, precision: WeightPrecision = "float"
) -> LinearWeight:
    """Reorder weight [out, in] for the device it is on; the original may be dropped after.

    Raises:
        ValueError: int8 is asked for where there is none.
    """
    if precision == "float":
        return pack_float(weight, bias)
    if weight.device.type == "cpu" and native.int8_linear.serves():
        return native.int8_linear.pack(weight, bias)
    return pack_int8(weight, bias)


def linear(x: Tensor, weight: LinearWeight, activation: str | None = None) -> Tensor:
    """x [T, in] times the weight, plus its bias, through the activation if one is named.

    Returns [T, out] in x's dtype.  No row's bits depend on the other rows.
    """
    if isinstance(weight, PanelWeight):
        return native.int8_linear.int8_linear(x, weight, activation)
    if isinstance(weight, Int8Weight):
        return int8_linear(x, weight, activation)
    return float_linear(x, weight, activation)
