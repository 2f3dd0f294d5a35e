"""Memory in huge pages: 2 MiB have one page fault instead of 512."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache

from torch import Tensor

from nightjar.kernels.native.pointers import INT, POINTER

PAGE_BYTES = 2 << 20


def in_huge_pages(fresh: Tensor) -> Tensor:
    """Return a tensor on the CPU that nothing was written to, after asking for huge pages for it.

    The system may not have any. What does not fill a whole huge page has small ones.
    """
    begin = -(-fresh.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    end = (fresh.data_ptr() + fresh.nbytes) // PAGE_BYTES * PAGE_BYTES
    advise = _advise() if begin < end else None
    if advise is not None:
        advise(begin, end - begin, mmap.MADV_HUGEPAGE)  # advice: without it pages are small
    return fresh


@cache
def _advise() -> ctypes._NamedFuncPointer | None:
    """The system's madvise, where it knows huge pages."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function: ctypes._NamedFuncPointer = ctypes.CDLL(None).madvise
    function.argtypes = [POINTER, INT, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
