"""Starts kernels on the device of their tensors; each instance is compiled once.

CuPy starts them by default.  `using` replaces it, so that the tests run the same wrappers and the
same sources on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from nightjar.kernels.cuda.kernel import STORAGE, Argument, Kernel, Size


class Backend(Protocol):
    """Runs kernels somewhere."""

    def __call__(
        self,
        kernel: Kernel,
        grid: Size,
        block: Size,
        args: tuple[Argument, ...],
        shared_bytes: int,
    ) -> None:
        """Start the kernel on the stream that torch uses; does not wait for it."""


_backend: ContextVar[Backend | None] = ContextVar("backend", default=None)


def serves(tensor: Tensor) -> bool:
    """Whether these kernels take the tensor: one of their dtypes, on a GPU.

    While another backend replaces CuPy, on any device.
    """
    there = tensor.is_cuda or _backend.get() is not None
    return there and (tensor.dtype in STORAGE or not tensor.is_floating_point())


def launch(kernel: Kernel, grid: Size, block: Size, *args: Argument, shared_bytes: int = 0) -> None:
    """Run a kernel over `grid` blocks of `block` threads; an empty grid is no work.

    shared_bytes: of dynamic shared memory a block."""
    if 0 in grid:
        return
    backend = _backend.get()
    if backend is None:
        from nightjar.kernels.cuda.cupy_backend import run  # noqa: PLC0415 (needs CuPy)

        backend = run
    backend(kernel, grid, block, args, shared_bytes)


@contextmanager
def using(backend: Backend | None) -> Iterator[None]:
    """Run kernels on this backend inside the block; None: on the GPU by CuPy."""
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)
