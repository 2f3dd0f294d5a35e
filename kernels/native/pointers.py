"""Handing tensors to C: checked views, and the types of arguments."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

POINTER = ctypes.c_void_p
INT = ctypes.c_int64
FLOAT = ctypes.c_float


def by_row(x: Tensor) -> Tensor:
    """x [T, heads, D] as it is if each row is contiguous, else a copy that is."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def address(array: np.ndarray) -> int:
    """Where a contiguous int64 array lies."""
    if array.dtype != np.int64 or not array.flags.c_contiguous:
        raise TypeError(f"{array.dtype} array with strides {array.strides}: contiguous int64")
    return int(array.ctypes.data)


def is_plain(x: Tensor) -> bool:
    """Whether x holds FP32 numbers in this machine's memory."""
    return x.dtype == torch.float32 and x.device.type == "cpu"
