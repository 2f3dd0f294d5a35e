"""Norms over the residual stream, compiled."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from nightjar.kernels.native.build import compiled, library
from nightjar.kernels.native.pointers import FLOAT, INT, POINTER, is_plain
from nightjar.kernels.operands import Norm
from nightjar.kernels.reference import norm as reference


def serves(residual: Tensor, delta: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether these kernels take the rows residual, delta [T, H]."""
    return (
        out_dtype == torch.float32
        and _are_rows(residual)
        and (delta is None or _are_rows(delta))
        and library() is not None
    )


def _are_rows(x: Tensor) -> bool:
    return x.dim() == 2 and is_plain(x) and x.is_contiguous()


def layer_norm(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """As reference.norm.layer_norm."""
    if not serves(residual, delta, out_dtype):
        return reference.layer_norm(residual, delta, weight, bias, epsilon, out_dtype)
    return _normalized(residual, delta, NormArgument.of(weight, bias, epsilon))


def rms_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, out_dtype: torch.dtype
) -> Tensor:
    """As reference.norm.rms_norm."""
    if not serves(residual, delta, out_dtype):
        return reference.rms_norm(residual, delta, weight, epsilon, out_dtype)
    return _normalized(residual, delta, NormArgument.of(weight, None, epsilon))


def norm_argument(norm: Norm) -> NormArgument:
    """Return the norm as the kernels take it; the caller must keep the norm."""
    return NormArgument.of(norm.weight, norm.bias, norm.epsilon)


class NormArgument(ctypes.Structure):
    """A norm as norm.h takes it; it does not keep its tensors alive."""

    _fields_ = (("weight", POINTER), ("bias", POINTER), ("size", INT), ("epsilon", FLOAT))

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None, epsilon: float) -> NormArgument:
        """weight, bias: float32[H], contiguous."""
        if not all(is_plain(x) and x.is_contiguous() for x in (weight, bias) if x is not None):
            raise ValueError(f"a norm's weight is {weight.dtype}{list(weight.shape)}: float32[H]")
        address = None if bias is None else bias.data_ptr()
        return NormArgument(weight.data_ptr(), address, weight.shape[0], epsilon)


def _normalized(residual: Tensor, delta: Tensor | None, norm: NormArgument) -> Tensor:
    out = torch.empty_like(residual)
    _function()(
        norm,
        residual.data_ptr(),
        None if delta is None else delta.data_ptr(),
        residual.shape[0],
        out.data_ptr(),
    )
    return out


@cache
def _function() -> ctypes._NamedFuncPointer:
    kernels = compiled()
    function = kernels.norm
    function.argtypes = [ctypes.POINTER(NormArgument), POINTER, POINTER, INT, POINTER]
    function.restype = None
    return function
