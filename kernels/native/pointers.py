"""Passes tensors to C: checked views, and the types of arguments."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

POINTER = ctypes.c_void_p
INT = ctypes.c_int64
FLOAT = ctypes.c_float


def by_row(x: Tensor) -> Tensor:
    """Return x [T, heads, D] if each row is contiguous, else a contiguous copy."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def address(array: np.ndarray) -> int:
    """Return the address of a contiguous int64 array."""
    if array.dtype != np.int64 or not array.flags.c_contiguous:
        raise TypeError(f"{array.dtype} array with strides {array.strides}: contiguous int64")
    return int(array.ctypes.data)


def is_plain(x: Tensor) -> bool:
    """Whether x holds FP32 numbers in the host's memory."""
    return x.dtype == torch.float32 and x.device.type == "cpu"
