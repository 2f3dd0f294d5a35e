"""Writing keys and values into the paged cache, compiled."""

from __future__ import annotations

import ctypes
from functools import cache

from torch import Tensor

from nightjar.kernels.native.attention import cache_arguments
from nightjar.kernels.native.build import compiled
from nightjar.kernels.native.pointers import INT, POINTER, by_row


def kv_write(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor
) -> None:
    """As reference.paged_cache; the cache is one that `attention.serves`."""
    k, v = by_row(k), by_row(v)
    if k.stride(0) != v.stride(0):
        raise ValueError(f"rows of k and v lie {k.stride(0)} and {v.stride(0)} apart")
    _function()(
        *cache_arguments(keys, values),
        k.data_ptr(),
        v.data_ptr(),
        k.stride(0),
        k.shape[0],
        blocks.data_ptr(),
        offsets.data_ptr(),
    )


@cache
def _function() -> ctypes._NamedFuncPointer:
    kernels = compiled()
    function = kernels.kv_write
    function.argtypes = [POINTER] * 2 + [INT] * 4 + [POINTER] * 2 + [INT] * 2 + [POINTER] * 2
    function.restype = None
    return function
