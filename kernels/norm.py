"""Normalisation over the residual stream, by whichever backend serves its dtype and layout."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, dtype

from nightjar.kernels import cuda_ops, native, reference
from nightjar.kernels.cuda.launch import serves
from nightjar.kernels.native.norm import NormArgument


@dataclass(frozen=True)
class Norm:
    """A layer norm, or without a bias a root-mean-square norm: weight, bias float32[H]."""

    weight: Tensor
    bias: Tensor | None
    epsilon: float

    @cached_property
    def native(self) -> NormArgument:
        """As the compiled kernels take it."""
        return NormArgument.of(self.weight, self.bias, self.epsilon)


def normalize(residual: Tensor, delta: Tensor | None, norm: Norm, out_dtype: dtype) -> Tensor:
    """layer_norm or rms_norm of the residual stream: out_dtype[T, H]."""
    if norm.bias is None:
        return rms_norm(residual, delta, norm.weight, norm.epsilon, out_dtype)
    return layer_norm(residual, delta, norm.weight, norm.bias, norm.epsilon, out_dtype)


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
    if serves(residual):
        return cuda_ops.layer_norm(residual, delta, weight, bias, epsilon, out_dtype)
    if native.norm.serves(residual, delta, out_dtype):
        return native.norm.layer_norm(residual, delta, weight, bias, epsilon)
    return reference.norm.layer_norm(residual, delta, weight, bias, epsilon, out_dtype)


def rms_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, out_dtype: dtype
) -> Tensor:
    """Root-mean-square norm, x / sqrt(mean(x^2) + epsilon) * weight (arXiv 1910.07467).

    residual: [..., H]; delta: [..., H], added to it in place first (residual must be float32
    then), or None; weight: float32[H].  Returns out_dtype[..., H], computed in FP32.
    """
    if serves(residual):
        return cuda_ops.rms_norm(residual, delta, weight, epsilon, out_dtype)
    if native.norm.serves(residual, delta, out_dtype):
        return native.norm.rms_norm(residual, delta, weight, epsilon)
    return reference.norm.rms_norm(residual, delta, weight, epsilon, out_dtype)
