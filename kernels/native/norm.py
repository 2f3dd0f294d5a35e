"""Norms over the residual stream, compiled."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from nightjar.kernels.native.build import library
from nightjar.kernels.native.pointers import FLOAT, INT, POINTER, is_plain


def serves(residual: Tensor, delta: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether these kernels take the rows residual, delta [T, H]."""
    return (
        all(
            x.dim() == 2 and is_plain(x) and x.is_contiguous()
            for x in (residual, delta)
            if x is not None
        )
        and out_dtype == torch.float32
        and library() is not None
    )


def layer_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, epsilon: float
) -> Tensor:
    """As reference.norm.layer_norm: float32[T, H]."""
    out = torch.empty_like(residual)
    _functions().layer_norm(
        residual.data_ptr(),
        None if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr(),
        *residual.shape,
        epsilon,
        out.data_ptr(),
    )
    return out


def rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """As reference.norm.rms_norm: float32[T, H]."""
    out = torch.empty_like(residual)
    _functions().rms_norm(
        residual.data_ptr(),
        None if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        *residual.shape,
        epsilon,
        out.data_ptr(),
    )
    return out


@cache
def _functions() -> ctypes.CDLL:
    """The library, with the types of what is called here."""
    kernels = library()
    if kernels is None:
        raise RuntimeError("the compiled kernels are not there: ask `serves` first")
    kernels.layer_norm.argtypes = [POINTER] * 4 + [INT] * 2 + [FLOAT, POINTER]
    kernels.rms_norm.argtypes = [POINTER] * 3 + [INT] * 2 + [FLOAT, POINTER]
    for function in (kernels.layer_norm, kernels.rms_norm):
        function.restype = None
    return kernels
