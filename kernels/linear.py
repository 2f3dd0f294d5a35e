"""Matrix products with packed weights, and parts of a block that some weights compute in one call.

The weights know their backend, see operands.LinearWeight.  Where a weight does not compute a part
in one call, its norm and its products are called here one after another.  `added`, what LoRA
adapters add to a part, is computed in the same call, or here after it.
"""

import torch
from torch import Tensor, dtype

from nightjar.kernels.low_rank import Added, Place, RowGroup
from nightjar.kernels.operands import LinearWeight, Norm
from nightjar.kernels.ops import activation as apply_activation
from nightjar.kernels.ops import add_low_rank, layer_norm, rms_norm


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


def adapted_linear(x: Tensor, weight: LinearWeight, added: Added) -> Tensor:
    """Compute `linear` of an attention's result x [T, in], with what adapters add to it: [T, out].

    Returns float32, or float64 for x of that.
    """
    at_once = weight.adapted_linear(x, added)
    if at_once is not None:
        return at_once
    y = weight.linear(x, None, None)
    y = y.to(_wide(y))
    _add_attention_out(y, x, added)
    return y


def linear_onto(
    residual: Tensor, x: Tensor, weight: LinearWeight, added: Added | None = None
) -> Tensor | None:
    """Add `linear` of x to the residual stream float32[T, H], in place.

    Where the product cannot end in an addition, return what is to be added; the next norm adds it.
    added: what adapters add to an attention's output.
    """
    if weight.linear_onto(residual, x, added):
        return None
    if added is None:
        return weight.linear(x, None, None)
    left = linear_onto(residual, x, weight)
    _add_attention_out(residual, x, added)
    return left


def normed_linear(
    residual: Tensor,
    delta: Tensor | None,
    norm: Norm,
    weight: LinearWeight,
    out_dtype: dtype,
    added: Added | None = None,
) -> Tensor:
    """`linear` of the normalised residual stream, to which `delta` is added first, in place.

    residual, delta: as `normalize` takes them; added: what adapters add to queries, keys and
    values.  Returns out_dtype[T, out], rounded at the end.
    """
    at_once = weight.normed_linear(residual, delta, norm, None, out_dtype, added)
    if at_once is not None:
        return at_once
    own = None if added is None else added.at(Place.QUERY_KEY_VALUE)
    if own is None:
        return weight.linear(normalize(residual, delta, norm, weight.rows_dtype), None, out_dtype)
    y = normed_linear(residual, delta, norm, weight, _wide(residual))
    x = normalize(own.gathered(residual), None, norm, _wide(residual))
    _add(y, own.rows.rows, x, own.groups(Place.QUERY_KEY_VALUE))
    return y.to(out_dtype)


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


def adapted_feed_forward_onto(
    residual: Tensor,
    norm: Norm,
    up: LinearWeight,
    down: LinearWeight,
    activation: str,
    out_dtype: dtype,
    added: Added,
) -> Tensor | None:
    """Add `adapted_feed_forward` to the residual stream in place, or return it."""
    if up.feed_forward_onto(residual, None, norm, down, activation, added):
        return None
    if added.at(Place.UP, Place.DOWN) is None:
        return feed_forward_onto(residual, None, norm, up, down, activation, out_dtype)
    return adapted_feed_forward(residual, norm, up, down, activation, out_dtype, added)


def adapted_feed_forward(
    residual: Tensor,
    norm: Norm,
    up: LinearWeight,
    down: LinearWeight,
    activation: str,
    out_dtype: dtype,
    added: Added,
) -> Tensor:
    """Compute `feed_forward` without a delta, with what adapters add: at least float32[T, H].

    Rows without an adapter are computed as in a step of their own: what is beside them changes no
    bit.
    """
    at_once = up.feed_forward(residual, None, norm, down, activation, added)
    if at_once is not None:
        return at_once
    own, wide = added.at(Place.UP, Place.DOWN), _wide(residual)
    if own is None:
        return feed_forward(residual, None, norm, up, down, activation, out_dtype)
    y = torch.empty_like(residual, dtype=wide)
    if own.rows.plain.numel():
        plain = residual.index_select(0, own.rows.plain)
        found = feed_forward(plain, None, norm, up, down, activation, out_dtype)
        y.index_copy_(0, own.rows.plain, found.to(wide))
    x = normalize(own.gathered(residual), None, norm, up.rows_dtype)
    products = up.unactivated(x)
    halves = [product.to(wide) for product in products]
    places = torch.arange(x.shape[0], device=x.device)
    for half, gated in zip(halves, (False, True), strict=False):
        _add(half, places, x, own.groups(Place.UP, gated=gated))
    inner = apply_activation(halves[0], activation)
    inner = inner.mul_(halves[1]) if len(halves) == 2 else inner
    found = down.linear(inner.to(products[0].dtype), None, None).to(wide)
    _add(found, places, inner, own.groups(Place.DOWN))
    y.index_copy_(0, own.rows.rows, found)
    return y


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


def _add_attention_out(y: Tensor, x: Tensor, added: Added) -> None:
    """Add what adapters add to an attention's output, in place."""
    own = added.at(Place.ATTENTION_OUT)
    if own is not None:
        _add(y, own.rows.rows, own.gathered(x), own.groups(Place.ATTENTION_OUT))


def _add(y: Tensor, rows: Tensor, x: Tensor, groups: list[RowGroup]) -> None:
    add_low_rank(y, x.to(y.dtype), rows, groups)


def _wide(x: Tensor) -> dtype:
    """Return the dtype of sums."""
    return torch.promote_types(x.dtype, torch.float32)
