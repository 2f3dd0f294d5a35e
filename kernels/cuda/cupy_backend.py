"""Kernels on a GPU: compiled by NVRTC, kept on disk, loaded and started by CuPy.

NVRTC is called by `nvrtc.py` and not by CuPy, so that what runs is byte for byte what
`kernel_budget.py` checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import cupy
import torch
from torch import Tensor

from nightjar.kernels.cache_folder import cache_folder
from nightjar.kernels.cuda.cubin_cache import cubin
from nightjar.kernels.cuda.kernel import Argument, Kernel, Size


@dataclass(slots=True)
class Loaded:
    """A kernel on one device.

    raw: for its attributes; start: CuPy's function behind it, asked for once; shared_bytes: the
    dynamic shared memory that it has been allowed.
    """

    raw: Any
    start: Any
    shared_bytes: int = 0


def run(
    kernel: Kernel, grid: Size, block: Size, args: tuple[Argument, ...], shared_bytes: int
) -> None:
    """Start a kernel on torch's current stream and device."""
    device = torch.cuda.current_device()
    loaded = _loaded(kernel, device)
    # Read at every launch, because under graph capture torch's current stream is the captured one.
    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream())
    pointers = tuple([_argument(kernel, argument, device) for argument in args])
    if shared_bytes > loaded.shared_bytes:  # more than 48 KB must be allowed
        loaded.raw.max_dynamic_shared_size_bytes = loaded.shared_bytes = shared_bytes
    loaded.start(grid, block, pointers, shared_mem=shared_bytes, stream=stream)


def _argument(kernel: Kernel, argument: Argument, device: int) -> Any:  # noqa: ANN401
    """Return an argument as CuPy takes it: addresses as integers, numbers as they are."""
    if argument is None:
        return 0
    if not isinstance(argument, Tensor):
        return argument
    # A GPU reads and writes pinned memory where it lies, by the same address.
    if argument.get_device() == device or (argument.device.type == "cpu" and argument.is_pinned()):
        return argument.data_ptr()
    raise ValueError(
        f"{kernel.expression}: a tensor is on {argument.device}, but the current device is "
        f"cuda:{device}; move it there"
    )


@cache
def _loaded(kernel: Kernel, device: int) -> Loaded:
    """Compiled and loaded; functions belong to a device."""
    major, minor = torch.cuda.get_device_capability(device)
    path, symbol = cubin(kernel, f"sm_{major}{minor}", cache_folder())
    with cupy.cuda.Device(device):
        raw = cupy.RawModule(path=str(path)).get_function(symbol)
        return Loaded(raw, raw.kernel)
