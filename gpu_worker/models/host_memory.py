"""The pages behind a large tensor on the host."""

import ctypes
import mmap
import sys
from threading import Thread

from torch import Tensor

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_AT_ONCE_BYTES = 2 << 20
"""Of one call: while it runs, nothing else of the process can be given memory or give it back."""

if sys.platform == "linux":
    _libc = ctypes.CDLL(None)
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def take_pages(*tensors: Tensor) -> Thread:
    """Have the system find memory for all pages of tensors, in a thread that ends when it has.

    What they hold stays as it is, so they may be used meanwhile. Where the system cannot be asked,
    it finds each page when that is first written to, as it would anyway.
    """
    thread = Thread(target=_take, args=(tensors,), name="pages", daemon=True)
    thread.start()
    return thread


def _take(tensors: tuple[Tensor, ...]) -> None:
    if sys.platform != "linux":
        return
    for tensor in tensors:
        end = tensor.data_ptr() + tensor.nbytes
        place = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        while place < end:
            if _libc.madvise(place, min(_AT_ONCE_BYTES, end - place), _MADV_POPULATE_WRITE):
                return
            place += _AT_ONCE_BYTES
