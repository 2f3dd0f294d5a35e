"""Layer normalisation over the residual stream."""

from torch import Tensor, dtype
from torch.nn import functional as F


def layer_norm(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    out_dtype: dtype,
) -> Tensor:
    """Add `delta` to the residual stream in place, and return the normalised rows.

    residual: float32[T, H], the stream, changed; delta: [T, H] of any float dtype, what the last
    block adds, or None; weight, bias: float32[H].  Returns out_dtype[T, H].
    The stream stays in FP32 whatever the storage dtype, so that rounding does not pile up over
    the layers.
    """
    if delta is not None:
        residual.add_(delta)
    return F.layer_norm(residual, residual.shape[-1:], weight, bias, epsilon).to(out_dtype)
