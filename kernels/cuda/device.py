"""Is there a GPU that the kernels can run on, and if not, why; does it work; how large is it; what
has it left."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec

import torch

OLDEST = (8, 0)
"""Compute capability: bfloat16, and what the compile gate looks at."""


class DeviceError(Exception):
    """A device that cannot be used: which, why, and what mends it."""


def use_device(name: str) -> str:
    """Make "cuda" or "cuda:i" the device that kernels start on; "cpu" needs nothing.

    Returns its whole name, "cuda:0" for "cuda".

    Raises:
        DeviceError: See there.
    """
    if name == "cpu":
        return name
    found = re.fullmatch(r"cuda(?::(\d+))?", name)
    if found is None:
        raise DeviceError(f"device {name!r}: use cpu, cuda or cuda:<number>")
    if torch.version.cuda is None:
        raise DeviceError(
            f"device {name}: torch {torch.__version__} is built without CUDA; install a CUDA build "
            "of torch"
        )
    count = torch.cuda.device_count()
    if count == 0:
        raise DeviceError(f"device {name}: torch sees no GPU; nvidia-smi says what the driver sees")
    index = int(found[1] or 0)
    if index >= count:
        raise DeviceError(f"device {name}: torch sees {count} GPUs, cuda:0 to cuda:{count - 1}")
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) < OLDEST:
        raise DeviceError(
            f"device {name}: compute capability {major}.{minor}, the kernels need 8.0 or later"
        )
    if find_spec("cupy") is None:
        raise DeviceError(f"device {name}: CuPy is not installed; install nightjar-batch[gpu]")
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def require_working(device: torch.device) -> None:
    """Wait for all that a device has been asked for.

    Raises:
        RuntimeError: A kernel failed (an address that is not its own, say): the device then does
            nothing more for this process, whoever asks.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(name: str) -> int:
    """What a GPU has left."""
    torch.cuda.empty_cache()  # what loading took in passing is free, too
    free, _ = torch.cuda.mem_get_info(name)
    return free


def multiprocessors(tensor: torch.Tensor) -> int:
    """Of the tensor's device; on a CPU so few that blocks have several pieces of work."""
    return _multiprocessors_of(tensor.get_device()) if tensor.is_cuda else 1


@cache
def _multiprocessors_of(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def block_shared_bytes(tensor: torch.Tensor) -> int:
    """Shared memory that a block may have on the tensor's device: 163 KB of compute capability 8.0,
    99 of 8.6, 8.9 and 12.0; on a CPU the former."""
    return _block_shared_bytes_of(tensor.get_device()) if tensor.is_cuda else 163 << 10


@cache
def _block_shared_bytes_of(device: int) -> int:
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
