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
    """As kernels.norm says; residual: [T, H] in FP32 at least."""
    if delta is not None:
        residual.add_(delta)
    return F.layer_norm(residual, residual.shape[-1:], weight, bias, epsilon).to(out_dtype)


def rms_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, out_dtype: dtype
) -> Tensor:
    """As kernels.norm says.

    Square root and division, unlike a vectorised rsqrt, are exact wherever an element lies.
    """
    if delta is not None:
        residual.add_(delta)
    x = widened(residual)
    size = x.square().mean(-1, keepdim=True).add_(epsilon).sqrt_()
    return torch.div(x, size).mul_(weight).to(out_dtype)
