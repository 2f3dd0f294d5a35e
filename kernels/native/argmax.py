"""The best token of every row of scores, compiled."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from nightjar.kernels.native.build import compiled, library
from nightjar.kernels.native.pointers import INT, POINTER, is_plain
from nightjar.kernels.reference import sampling as reference


def serves(logits: Tensor) -> bool:
    """Whether this kernel takes scores [B, V]."""
    return is_plain(logits) and logits.is_contiguous() and library() is not None


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As reference.sampling.argmax."""
    if not serves(logits):
        return reference.argmax(logits)
    rows, width = logits.shape
    if not width:
        raise ValueError("no vocabulary")
    tokens = torch.empty(rows, dtype=torch.int64)
    finite = torch.empty(rows, dtype=torch.bool)
    _function()(logits.data_ptr(), rows, width, tokens.data_ptr(), finite.data_ptr())
    return tokens, finite


@cache
def _function() -> ctypes._NamedFuncPointer:
    kernels = compiled()
    function = kernels.argmax
    function.argtypes = [POINTER, INT, INT, POINTER, POINTER]
    function.restype = None
    return function
