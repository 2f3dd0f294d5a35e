"""One instance of a kernel: source, template arguments, and the types of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

STORAGE = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes of weights, activations and the cache, which may also be in FP8."""

HEAD_SIZES = (64, 80, 96, 128)
"""Channels of a head in the families that the engine knows."""

Argument: TypeAlias = Tensor | np.generic | None
"""A pointer, a number of the size that the kernel takes, or the null pointer."""

Size: TypeAlias = tuple[int, ...]
"""Blocks of a grid or threads of a block: x, y, z."""

FP8 = torch.uint8
"""The dtype of a cache in FP8: bytes of e4m3 numbers."""

CTYPES = {
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float32: "float",
    FP8: "unsigned char",
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """source: name of the .cu file; entry: the function; arguments: of its template."""

    source: str
    entry: str
    arguments: tuple[str, ...] = ()

    @staticmethod
    @lru_cache(maxsize=None, typed=True)  # typed: True is not 1 in C++
    def of(source: str, entry: str, *arguments: torch.dtype | int | bool | str) -> Kernel:
        """Make an instance; dtypes become C++ types, numbers and truth values C++ constants."""
        return Kernel(source, entry, tuple(_cpp(argument) for argument in arguments))

    @property
    def expression(self) -> str:
        """The instance in C++, as in NVRTC's name expressions: `norm<float, __half, 4>`."""
        return f"{self.entry}<{', '.join(self.arguments)}>" if self.arguments else self.entry


def _cpp(argument: torch.dtype | int | bool | str) -> str:
    """A template argument as C++ writes it."""
    if isinstance(argument, torch.dtype):
        return CTYPES[argument]
    if isinstance(argument, bool):
        return "true" if argument else "false"
    return str(argument)
