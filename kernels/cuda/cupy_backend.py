"""Kernels on a GPU: compiled by NVRTC, kept on disk, loaded and started by CuPy.

NVRTC is called by `nvrtc.py` and not by CuPy, so that what runs is byte for byte what the compile
gate looked at.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import cupy
import torch
from torch import Tensor

from nightjar.kernels.cuda.cubin_cache import cache_folder, cubin
from nightjar.kernels.cuda.kernel import Kernel
from nightjar.kernels.cuda.launch import Argument, Size


def run(
    kernel: Kernel, grid: Size, block: Size, args: tuple[Argument, ...], shared_bytes: int
) -> None:
    """Start a kernel on torch's current stream and device."""
    device = torch.cuda.current_device()
    function = _function(kernel, device)
    # Asked for at every launch: under graph capture torch's current stream is the captured one.
    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream())
    pointers = tuple(_argument(kernel, argument, device) for argument in args)
    if shared_bytes:  # more than 48 KB must be allowed
        allowed = function.max_dynamic_shared_size_bytes
        function.max_dynamic_shared_size_bytes = max(allowed, shared_bytes)
    with stream:
        function(grid, block, pointers, shared_mem=shared_bytes)


def _argument(kernel: Kernel, argument: Argument, device: int) -> Any:  # noqa: ANN401
    """What CuPy passes on: addresses as integers, numbers as they are."""
    if argument is None:
        return 0
    if not isinstance(argument, Tensor):
        return argument
    if argument.device.type == "cpu" and argument.is_pinned():
        return argument.data_ptr()  # a GPU reads and writes it where it lies, by the same address
    if argument.device.type != "cuda" or argument.device.index != device:
        raise ValueError(
            f"{kernel.expression}: a tensor is on {argument.device}, but the current device is "
            f"cuda:{device}; move it there"
        )
    return argument.data_ptr()


@cache
def _function(kernel: Kernel, device: int) -> Any:  # noqa: ANN401
    """The loaded kernel; functions belong to a device."""
    major, minor = torch.cuda.get_device_capability(device)
    path, symbol = cubin(kernel, f"sm_{major}{minor}", cache_folder())
    with cupy.cuda.Device(device):
        return cupy.RawModule(path=str(path)).get_function(symbol)
