"""One attention from partial ones: see merge.cu.

Bytes, splits: 4 (D + 2) for each split of a row, and s D of the result; two sets: 3 s D a row.
About 3 operations a number read: bound by memory, and at few rows by the launch and by how long
memory takes to answer, so 8 splits are asked for at once, before their weights are known.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import ceil_div, check, check_storage
from nightjar.kernels.cuda.kernel import STORAGE, Kernel
from nightjar.kernels.cuda.launch import launch
from nightjar.kernels.cuda.qkv_post import HEAD_SIZES

SPLIT = 128
"""Positions of a split.  A constant: the order of a row's sums depends on it."""

ROWS = 4
"""Of a block, a warp each."""


def merge_splits(
    parts: Tensor, stats: Tensor, lengths: Tensor, out: Tensor, lse: Tensor | None = None
) -> None:
    """Fill out [B, H, D] (and lse float32[B, H]) from the splits of decode attention.

    parts: float32[B, H, N, D], sums of exp(score - maximum) * value; stats: float32[B, H, N, 2],
    maximum and sum of exponentials; lengths: int32[B]; SPLIT positions each.  Splits from a
    sequence's end on are not read.
    """
    batch, heads, splits, head_size = parts.shape
    check_storage("out", out)
    check("parts", parts, torch.float32, (None, None, None, None))
    check("stats", stats, torch.float32, (batch, heads, splits, 2), like=parts)
    check("lengths", lengths, torch.int32, (batch,), like=parts)
    check("out", out, out.dtype, (batch, heads, head_size), like=parts)
    if lse is not None:
        check("lse", lse, torch.float32, (batch, heads), like=parts)
    rows = batch * heads
    launch(
        Kernel.of("merge", "merge_splits", out.dtype, head_size, SPLIT),
        (ceil_div(rows, ROWS),),
        (32, ROWS),
        parts,
        stats,
        lengths,
        out,
        lse,
        np.int64(rows),
        np.int32(heads),
        np.int32(splits),
    )


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """As kernels.merge_attention: [T, H, D] twice and float32[T, H] twice -> [T, H, D].

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
    """Every instance that the engine can ask for."""
    for storage in STORAGE:
        yield Kernel.of("merge", "merge_attention", storage)
        for head_size in HEAD_SIZES:
            yield Kernel.of("merge", "merge_splits", storage, head_size, SPLIT)
