"""Normalisation over the residual stream."""

import torch
from torch import Tensor, dtype
from torch.nn import functional as F

from nightjar.kernels.reference.widened import widened


def layer_norm(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    out_dtype: dtype,
) -> Tensor:
    """Add `delta` to the residual stream in place, and return the normalised rows.

    residual: [T, H], the stream, in FP32 at least, changed; delta: [T, H] of any float dtype, what
    the last block adds, or None; weight, bias: float32[H].  Returns out_dtype[T, H].
    The stream stays in FP32 for every storage dtype, so that rounding does not add up over the
    layers.
    """
    if delta is not None:
        residual.add_(delta)
    return F.layer_norm(residual, residual.shape[-1:], weight, bias, epsilon).to(out_dtype)


def rms_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, out_dtype: dtype
) -> Tensor:
    """Compute the root-mean-square norm, x / sqrt(mean(x^2) + epsilon) * weight (arXiv 1910.07467).

    residual: [..., H]; delta: [..., H], added to it in place first (residual must be float32
    then), or None; weight: float32[H].  Returns out_dtype[..., H], computed in FP32.
    """
    # Square root and division round correctly at every position; a vectorised rsqrt does not.
    if delta is not None:
        residual.add_(delta)
    x = widened(residual)
    size = x.square().mean(-1, keepdim=True).add_(epsilon).sqrt_()
    return torch.div(x, size).mul_(weight).to(out_dtype)
