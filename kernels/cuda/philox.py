"""Random numbers by counter: see philox.cu.

Bytes: 32 a number; 100 integer operations: bound by the launch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import ceil_div, check
from nightjar.kernels.cuda.kernel import Kernel
from nightjar.kernels.cuda.launch import launch

THREADS = 128

_KERNEL = Kernel("philox", "uniform")


def uniform(seeds: Tensor, streams: Tensor, steps: Tensor) -> Tensor:
    """As reference.philox.uniform, bit for bit: int64[B] three times -> float64[B] in [0, 1)."""
    check("seeds", seeds, torch.int64, (None,))
    check("streams", streams, torch.int64, seeds.shape, like=seeds)
    check("steps", steps, torch.int64, seeds.shape, like=seeds)
    count = seeds.shape[0]
    draws = torch.empty(count, dtype=torch.float64, device=seeds.device)
    grid = (ceil_div(count, THREADS),)
    launch(_KERNEL, grid, (THREADS,), seeds, streams, steps, draws, np.int64(count))
    return draws


def specialisations() -> Iterator[Kernel]:
    """Yield every instance that the engine uses."""
    yield _KERNEL
