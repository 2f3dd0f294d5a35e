"""A GPU's numbers for the kernels: its multiprocessors and its shared memory."""

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
