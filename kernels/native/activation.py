"""Activations of whole rows, compiled."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from nightjar.kernels.native.build import compiled, library
from nightjar.kernels.native.pointers import INT, POINTER, is_plain
from nightjar.kernels.native.products import ACTIVATIONS
from nightjar.kernels.reference import activation as reference


def serves(x: Tensor, kind: str) -> bool:
    """Whether this kernel takes the numbers x, and knows the activation."""
    return is_plain(x) and x.is_contiguous() and kind in ACTIVATIONS and library() is not None


def activation(x: Tensor, kind: str) -> Tensor:
    """As reference.activation.activation."""
    if not serves(x, kind):
        return reference.activation(x, kind)
    out = torch.empty_like(x)
    _function()(x.data_ptr(), x.numel(), ACTIVATIONS[kind], out.data_ptr())
    return out


@cache
def _function() -> ctypes._NamedFuncPointer:
    function: ctypes._NamedFuncPointer = compiled().activation
    function.argtypes = [POINTER, INT, INT, POINTER]
    function.restype = None
    return function
