"""The devices of the kernels: which can be used, how much memory is free, whether they work.

The rest of the product calls this module and never a backend.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

import torch

from nightjar.kernels.cuda.kernel import HEAD_SIZES
from nightjar.kernels.cuda.sample import MAX_VOCAB
from nightjar.kernels.cuda.switches import Switches, choose, using
from nightjar.kernels.native.build import NativeBuildError, identity, library

__all__ = [
    "HEAD_SIZES",
    "MAX_VOCAB",
    "DeviceError",
    "Switches",
    "choose",
    "fp8_missing",
    "free_bytes",
    "identity",
    "require_working",
    "use_device",
    "using",
    "warm_up",
]

OLDEST = (8, 0)
"""Least compute capability: it has bfloat16, and kernel_budget.py checks it."""


OLDEST_FP8 = (8, 9)
"""Least compute capability whose tensor cores multiply numbers in FP8."""


class DeviceError(Exception):
    """A device cannot be used; the message says which, why, and how to correct it."""


def use_device(name: str) -> str:
    """Make "cuda" or "cuda:i" the device that kernels start on; "cpu" needs nothing.

    Returns the device's full name, "cuda:0" for "cuda".

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


def warm_up() -> None:
    """Compile the CPU's kernels now, so that the first step does not wait for it.

    Raises:
        DeviceError: NIGHTJAR_CPU_KERNELS asks for them and they cannot be compiled.
    """
    try:
        library()
    except NativeBuildError as error:
        raise DeviceError(str(error)) from error


def require_working(device: torch.device) -> None:
    """Wait until a GPU has finished its work; a CPU is not waited for.

    Raises:
        RuntimeError: A kernel failed, on a wrong address for example. The device then does nothing
            more for this process.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fp8_missing(name: str) -> str | None:
    """Return why a GPU cannot multiply numbers in FP8; None where it can."""
    major, minor = torch.cuda.get_device_capability(name)
    if (major, minor) >= OLDEST_FP8:
        return None
    return f"it has compute capability {major}.{minor}, and products in FP8 need 8.9 or later"


def free_bytes(name: str) -> int:
    """Return the free memory of a GPU."""
    torch.cuda.empty_cache()  # memory that only loading needed counts as free
    free, _ = torch.cuda.mem_get_info(name)
    return free
