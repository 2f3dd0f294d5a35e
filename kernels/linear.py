"""Matrix products with packed weights, and parts of a block that some weights compute in one call.

The weights know their backend, see operands.LinearWeight.  Where a weight does not compute a part
in one call, its norm and its products are called here one after another.
"""

from torch import Tensor, dtype

from nightjar.kernels.operands import LinearWeight, Norm
from nightjar.kernels.ops import layer_norm, rms_norm


def normalize(residual: Tensor, delta: Tensor | None, norm: Norm, out_dtype: dtype) -> Tensor:
    """Compute layer_norm or rms_norm of the residual stream: out_dtype[T, H]."""
    if norm.bias is None:
        return rms_norm(residual, delta, norm.weight, norm.epsilon, out_dtype)
    return layer_norm(residual, delta, norm.weight, norm.bias, norm.epsilon, out_dtype)


def linear(
    x: Tensor,
    weight: LinearWeight,
    activation: str | None = None,
    out_dtype: dtype | None = None,
) -> Tensor:
    """Multiply x [T, in] by the weight, add its bias, and apply the activation if one is named.

    A gated weight gives activation(x @ gate) * (x @ up).
    Returns out_dtype[T, out].  Without out_dtype it is x's dtype, or float32 if the weight is int8
    or in panels, or its results are wide.  No row's bits depend on the other rows.
    """
    return weight.linear(x, activation, out_dtype)


def linear_onto(residual: Tensor, x: Tensor, weight: LinearWeight) -> Tensor | None:
    """Add `linear` of x to the residual stream float32[T, H], in place.

    Where the product cannot end in an addition, return what is to be added; the next norm adds it.
    """
    return None if weight.linear_onto(residual, x) else weight.linear(x, None, None)


def normed_linear(
    residual: Tensor, delta: Tensor | None, norm: Norm, weight: LinearWeight, out_dtype: dtype
) -> Tensor:
    """`linear` of the normalised residual stream, to which `delta` is added first, in place.

    residual, delta: as `normalize` takes them.  Returns out_dtype[T, out], rounded at the end.
    """
    at_once = weight.normed_linear(residual, delta, norm, None, out_dtype)
    if at_once is not None:
        return at_once
    return weight.linear(normalize(residual, delta, norm, weight.rows_dtype), None, out_dtype)


def feed_forward(
    residual: Tensor,
    delta: Tensor | None,
    norm: Norm,
    up: LinearWeight,
    down: LinearWeight,
    activation: str,
    out_dtype: dtype,
) -> Tensor:
    """A feed-forward block: activation(normalised @ up) @ down, gated where `up` is.

    residual, delta: as `normalize` takes them; delta is added first, in place.
    Returns out_dtype[T, H].
    """
    at_once = up.feed_forward(residual, delta, norm, down, activation)
    if at_once is not None:
        return at_once
    x = _widened(residual, delta, norm, up, activation, out_dtype)
    return down.linear(x, None, None)


def feed_forward_onto(
    residual: Tensor,
    delta: Tensor | None,
    norm: Norm,
    up: LinearWeight,
    down: LinearWeight,
    activation: str,
    out_dtype: dtype,
) -> Tensor | None:
    """Add `feed_forward` to the residual stream in place, or return it, as `linear_onto` does."""
    if up.feed_forward_onto(residual, delta, norm, down, activation):
        return None
    x = _widened(residual, delta, norm, up, activation, out_dtype)
    return linear_onto(residual, x, down)


def _widened(
    residual: Tensor,
    delta: Tensor | None,
    norm: Norm,
    up: LinearWeight,
    activation: str,
    out_dtype: dtype,
) -> Tensor:
    """Compute a feed-forward block up to its last product: out_dtype[T, I]."""
    at_once = up.normed_linear(residual, delta, norm, activation, out_dtype)
    if at_once is not None:
        return at_once
    return up.linear(normalize(residual, delta, norm, up.rows_dtype), activation, None)
