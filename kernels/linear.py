"""Matrix products with weights packed once, in floating point or in bytes, and the parts of a
block that are one call where the backend has them in one."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, TypeGuard

import torch
from torch import Tensor, dtype
from torch.nn import functional as F

from nightjar.kernels import cuda_ops, native, reference
from nightjar.kernels.cuda.launch import serves
from nightjar.kernels.cuda.switches import current
from nightjar.kernels.native.products import PanelWeight, Parts
from nightjar.kernels.norm import Norm, normalize
from nightjar.kernels.reference.int8_linear import Int8Weight, int8_linear, pack_int8
from nightjar.kernels.reference.linear import FloatWeight, float_linear, pack_float

LinearWeight: TypeAlias = FloatWeight | Int8Weight | PanelWeight
"""What `pack_linear` returns and `linear` takes."""


@dataclass(frozen=True, slots=True)
class GatedWeight:
    """Two weights of one shape, computed as activation(gate) * up: in one product where `gate` is
    None and `up` holds both."""

    gate: LinearWeight | None
    up: LinearWeight


WeightPrecision = Literal["float", "bfloat16", "int8"]
"""How products are computed: "float" in the weight's own dtype, "bfloat16" of numbers rounded to it
with sums in FP32, "int8" in bytes."""


def serves_bfloat16(device: str) -> bool:
    """Whether there are products of that precision for FP32 rows on the device."""
    return device == "cpu" and native.float_linear.serves_bfloat16()


def sum_in_fp32() -> None:
    """Let cuBLAS keep in FP32 what it adds up of 16-bit products that it has split, in the whole
    process: torch lets it round such parts to 16 bits, where they lose digits and may overflow."""
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def pack_linear(
    weight: Tensor, bias: Tensor | None, precision: WeightPrecision = "float"
) -> LinearWeight:
    """Reorder weight [out, in] for the device it is on; the original may be dropped after.

    Raises:
        ValueError: bfloat16 or int8 is asked for where there is none.
    """
    if precision == "bfloat16":
        return native.float_linear.pack(weight, bias, torch.bfloat16)
    if precision == "float":
        if _takes_panels(weight):
            return native.float_linear.pack(weight, bias)
        if weight.is_cuda:
            sum_in_fp32()
        return pack_float(weight, bias, blocked=not serves(weight))
    if serves(weight):
        raise ValueError("int8: there are no CUDA kernels for products in bytes; use bf16 or fp16")
    if weight.device.type == "cpu" and native.int8_linear.serves():
        return native.int8_linear.pack(weight, bias)
    return pack_int8(weight, bias)


def pack_gated(gate: Parts, up: Parts, precision: WeightPrecision = "float") -> GatedWeight:
    """Reorder two weights for `gated_linear`; raises as pack_linear does."""
    if precision == "int8" and gate[0].device.type == "cpu" and native.int8_linear.serves():
        return GatedWeight(None, native.int8_linear.pack_gated(gate, up))
    if precision == "bfloat16":
        return GatedWeight(None, native.float_linear.pack_gated(gate, up, torch.bfloat16))
    if precision == "float" and _takes_panels(gate[0]):
        return GatedWeight(None, native.float_linear.pack_gated(gate, up))
    return GatedWeight(pack_linear(*gate, precision), pack_linear(*up, precision))


def followed_by(weight: LinearWeight, after: LinearWeight | GatedWeight) -> LinearWeight:
    """The same weight, knowing what is read after it: a GPU's product of few rows asks for that
    ahead.  Other kinds stay as they are."""
    if not isinstance(weight, FloatWeight) or not serves(weight.data):
        return weight
    pair = (after.gate, after.up) if isinstance(after, GatedWeight) else (after,)
    following = [one.data for one in pair if isinstance(one, FloatWeight)]
    if not all(map(cuda_ops.serves_weight, following)):
        return weight
    return replace(weight, following=tuple(following))


def gated_linear(x: Tensor, weight: GatedWeight, activation: str) -> Tensor:
    """activation(x @ gate) * (x @ up) (GLU variants, arXiv 2002.05202): [T, in] -> [T, out]."""
    if weight.gate is None:
        return linear(x, weight.up, activation)
    if not serves(x):
        return linear(x, weight.gate, activation).mul_(linear(x, weight.up))
    gate, up = weight.gate, weight.up
    if _takes_few(up, x) and isinstance(gate, FloatWeight):
        return cuda_ops.linear(x, up.factor, activation, gate.factor, up.following)
    return cuda_ops.activation(linear(x, gate), activation, up=linear(x, up))


def linear(
    x: Tensor,
    weight: LinearWeight,
    activation: str | None = None,
    out_dtype: dtype | None = None,
) -> Tensor:
    """x [T, in] times the weight, plus its bias, through the activation if one is named.

    Returns out_dtype[T, out]; where none is asked for, in x's dtype, or float32 if the weight is
    int8 or in panels.  No row's bits depend on the other rows.
    """
    if isinstance(weight, PanelWeight):
        if activation is None:
            return native.products.linear(x, weight, out_dtype or torch.float32)
        y = native.products.activated_linear(x, weight, activation)
    elif isinstance(weight, Int8Weight):
        y = int8_linear(x.float(), weight, activation)
    elif _takes_few(weight, x):
        y = cuda_ops.linear(x, weight.factor, activation, following=weight.following)
    elif serves(x):
        y = F.linear(x, weight.data, weight.bias)
        y = y if activation is None else cuda_ops.activation(y, activation)
    else:
        y = float_linear(x, weight, activation)
    return y if out_dtype is None else y.to(out_dtype)


def linear_onto(residual: Tensor, x: Tensor, weight: LinearWeight) -> Tensor | None:
    """Add `linear` of x to the residual stream float32[T, H], in place, or return what is to be
    added, as the next norm takes it: where the product cannot end in an addition."""
    if isinstance(weight, PanelWeight) and native.products.serves_stream(residual, None):
        native.products.linear_onto(residual, x, weight)
        return None
    if _takes_few(weight, x):
        cuda_ops.linear_onto(residual, x, weight.factor, weight.following)
        return None
    return linear(x, weight)


def activation(x: Tensor, kind: str) -> Tensor:
    """gelu_tanh, gelu, relu or silu of every element: [T, I] in x's dtype, computed in FP32."""
    if serves(x):
        return cuda_ops.activation(x, kind)
    return reference.activation.activation(x, kind)


def normed_linear(
    residual: Tensor, delta: Tensor | None, norm: Norm, weight: LinearWeight, out_dtype: dtype
) -> Tensor:
    """`linear` of the normalised residual stream, to which `delta` is added first, in place.

    residual, delta: as `normalize` takes them.  Returns out_dtype[T, out], rounded at the end.
    """
    if isinstance(weight, PanelWeight) and native.products.serves_stream(residual, delta):
        return native.products.normed_linear(residual, delta, norm, weight, out_dtype)
    few = _few_normed(residual, delta, norm, weight, None)
    if few is not None:
        return few.to(out_dtype)
    own = weight.data.dtype if isinstance(weight, FloatWeight) else torch.float32
    return linear(normalize(residual, delta, norm, own), weight, None, out_dtype)


def feed_forward(
    residual: Tensor,
    delta: Tensor | None,
    norm: Norm,
    up: LinearWeight | GatedWeight,
    down: LinearWeight,
    activation: str,
    out_dtype: dtype,
) -> Tensor:
    """A feed-forward block: activation(normalised @ up) @ down, gated where `up` is.

    residual, delta: as `normalize` takes them; delta is added first, in place.
    Returns out_dtype[T, H].
    """
    panels = _panels_beside(residual, delta, up, down)
    if panels is not None:
        return native.products.feed_forward(residual, delta, norm, *panels, activation)
    return linear(_widened(residual, delta, norm, up, activation, out_dtype), down)


def feed_forward_onto(
    residual: Tensor,
    delta: Tensor | None,
    norm: Norm,
    up: LinearWeight | GatedWeight,
    down: LinearWeight,
    activation: str,
    out_dtype: dtype,
) -> Tensor | None:
    """Add `feed_forward` to the residual stream, in place, or return what is to be added, as
    `linear_onto` does."""
    panels = _panels_beside(residual, delta, up, down)
    if panels is None:
        x = _widened(residual, delta, norm, up, activation, out_dtype)
        return linear_onto(residual, x, down)
    native.products.feed_forward_onto(residual, delta, norm, *panels, activation)
    return None


def _widened(
    residual: Tensor,
    delta: Tensor | None,
    norm: Norm,
    up: LinearWeight | GatedWeight,
    activation: str,
    out_dtype: dtype,
) -> Tensor:
    """A feed-forward block up to its last product: out_dtype[T, I]."""
    few = _few_normed(residual, delta, norm, up, activation)
    if few is not None:
        return few
    x = normalize(residual, delta, norm, out_dtype)
    if isinstance(up, GatedWeight):
        return gated_linear(x, up, activation)
    return linear(x, up, activation)


def _takes_panels(weight: Tensor) -> bool:
    """Whether a weight is for the kernels of the CPU."""
    return not serves(weight) and native.float_linear.serves(weight)


def _takes_few(weight: LinearWeight, x: Tensor) -> TypeGuard[FloatWeight]:
    """Whether x has so few rows that a GPU has a kernel of its own for the product."""
    if not current().small_products or not isinstance(weight, FloatWeight):
        return False
    return serves(x) and cuda_ops.serves_rows(x, weight.data)


def _few_normed(
    residual: Tensor,
    delta: Tensor | None,
    norm: Norm,
    weight: LinearWeight | GatedWeight,
    activation: str | None,
) -> Tensor | None:
    """The product of few rows by the kernel that normalises them itself, in the weight's dtype, if
    it serves: it adds nothing to the stream first."""
    gate, up = (weight.gate, weight.up) if isinstance(weight, GatedWeight) else (None, weight)
    if delta is not None or not isinstance(up, FloatWeight) or not current().small_products:
        return None
    if not serves(residual) or not cuda_ops.serves_norm(residual, up.data):
        return None
    other = gate.factor if isinstance(gate, FloatWeight) else None
    return cuda_ops.normed_linear(residual, norm, up.factor, activation, other, up.following)


def block_panels(
    up: LinearWeight | GatedWeight, down: LinearWeight
) -> tuple[PanelWeight, PanelWeight] | None:
    """A feed-forward block's weights, if the compiled kernels take it as a whole."""
    whole = up.up if isinstance(up, GatedWeight) and up.gate is None else up
    if (
        isinstance(whole, PanelWeight)
        and isinstance(down, PanelWeight)
        and type(down) is type(whole)
    ):
        return whole, down
    return None


def _panels_beside(
    residual: Tensor, delta: Tensor | None, up: LinearWeight | GatedWeight, down: LinearWeight
) -> tuple[PanelWeight, PanelWeight] | None:
    """The same, if they take the stream, too."""
    return block_panels(up, down) if native.products.serves_stream(residual, delta) else None
