"""One attention from two over different keys: see merge.cu.

Bytes: 3 s D a row.  About 3 operations a number read: bound by memory, and at few rows by the
launch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import ceil_div, check, check_storage
from nightjar.kernels.cuda.kernel import STORAGE, Kernel
from nightjar.kernels.cuda.launch import launch

ROWS = 4
"""Of a block, a warp each."""


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """As reference.merge.merge_attention: [T, H, D] twice and float32[T, H] twice -> [T, H, D].

    A set with lse -inf is empty: its values are not read; two empty sets give 0.
    """
    check_storage("out_a", out_a)
    check("out_a", out_a, out_a.dtype, (None, None, None))
    check("out_b", out_b, out_a.dtype, out_a.shape, like=out_a)
    tokens, heads, head_size = out_a.shape
    check("lse_a", lse_a, torch.float32, (tokens, heads), like=out_a)
    check("lse_b", lse_b, torch.float32, (tokens, heads), like=out_a)
    out = torch.empty_like(out_a)
    rows = tokens * heads
    launch(
        Kernel.of("merge", "merge_attention", out.dtype),
        (ceil_div(rows, ROWS),),
        (32, ROWS),
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        np.int64(rows),
        np.int32(head_size),
    )
    return out


def specialisations() -> Iterator[Kernel]:
    """Yield every instance that the engine uses."""
    for storage in STORAGE:
        yield Kernel.of("merge", "merge_attention", storage)
