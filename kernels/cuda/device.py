"""A GPU's numbers for the kernels, and what torch's products give on it."""

from __future__ import annotations

from functools import cache

import torch


def multiprocessors(tensor: torch.Tensor) -> int:
    """Return the multiprocessors of the tensor's device; a CPU counts as 1."""
    return _multiprocessors_of(tensor.get_device()) if tensor.is_cuda else 1


@cache
def _multiprocessors_of(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def block_shared_bytes(tensor: torch.Tensor) -> int:
    """Return the shared memory that a block may have on the tensor's device.

    163 KB for compute capability 8.0, 99 KB for 8.6, 8.9 and 12.0. A CPU gives 163 KB.
    """
    return _block_shared_bytes_of(tensor.get_device()) if tensor.is_cuda else 163 << 10


@cache
def _block_shared_bytes_of(device: int) -> int:
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def sums_in_fp8(tensor: torch.Tensor) -> torch.dtype:
    """Return the widest dtype that torch's scaled product of rows in FP8 gives on a device.

    cuBLAS gives float32: on compute capability 9.x, with CUDA 12.9 or later.  Elsewhere torch 2.13
    calls CUTLASS, and refuses float32.  A CPU gives float32.
    """
    return _sums_in_fp8_of(tensor.get_device()) if tensor.is_cuda else torch.float32


@cache
def _sums_in_fp8_of(device: int) -> torch.dtype:
    major, _ = torch.cuda.get_device_capability(device)
    release = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return torch.float32 if major == 9 and release >= (12, 9) else torch.bfloat16
