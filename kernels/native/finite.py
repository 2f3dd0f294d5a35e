"""Rows of scores that are finite, compiled."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from nightjar.kernels.native.build import compiled, library
from nightjar.kernels.native.pointers import INT, POINTER, is_plain


def serves(scores: Tensor) -> bool:
    """Whether this kernel takes scores [B, V]."""
    return is_plain(scores) and scores.is_contiguous() and library() is not None


def finite_rows(scores: Tensor) -> Tensor:
    """As reference.sampling.finite_rows: bool[B]."""
    finite = torch.empty(scores.shape[0], dtype=torch.bool)
    _function()(scores.data_ptr(), *scores.shape, finite.data_ptr())
    return finite


@cache
def _function() -> ctypes._NamedFuncPointer:
    kernels = compiled()
    function = kernels.finite_rows
    function.argtypes = [POINTER, INT, INT, POINTER]
    function.restype = None
    return function
