"""Negative log-likelihoods from scores, compiled."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.native.build import compiled, library
from nightjar.kernels.native.pointers import INT, POINTER, address, is_plain
from nightjar.kernels.reference import log_prob as reference


def serves(logits: Tensor) -> bool:
    """Whether this kernel takes logits [N, V]."""
    return is_plain(logits) and logits.is_contiguous() and library() is not None


def target_nll(logits: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """As reference.log_prob.target_nll."""
    if not serves(logits):
        return reference.target_nll(logits, rows, targets)
    rows, targets = rows.contiguous(), targets.contiguous()
    nll = torch.empty(rows.shape[0])
    starts = np.flatnonzero(np.diff(rows.numpy(), prepend=-1, append=-1))
    _function()(
        logits.data_ptr(),
        logits.shape[1],
        rows.data_ptr(),
        targets.data_ptr(),
        address(starts),
        starts.size - 1,
        nll.data_ptr(),
    )
    return nll


@cache
def _function() -> ctypes._NamedFuncPointer:
    kernels = compiled()
    function = kernels.target_nll
    function.argtypes = [POINTER] + [INT] + [POINTER] * 3 + [INT, POINTER]
    function.restype = None
    return function
