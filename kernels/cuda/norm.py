"""Residual + delta, then LayerNorm or RMSNorm: see norm.cu.

Bytes of T rows of H columns, storage of s bytes: T * H * (8 for the stream, read and written back,
+ s for the delta + s for the result), plus 4 or 8 H of weights once.  About 8 operations an
element: bound by memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import INT32_MAX, ceil_div, check, check_storage, wide_elements
from nightjar.kernels.cuda.kernel import FP8, STORAGE, Kernel
from nightjar.kernels.cuda.launch import launch
from nightjar.kernels.cuda.product_rows import ROUNDED, Fp8Rows
from nightjar.kernels.operands import Norm

WARP_ROWS = 4
"""Rows of a block where each warp takes one: they fill a multiprocessor without a barrier."""

# (threads of a row, vectors of a thread, elements of a vector): the first that a row fits into.
# A warp a row saves both barriers for heads and small models; 256 threads with 4 vectors hold 4096
# columns in 16 registers each.
_WIDE_SHAPES = ((32, 4, 4), (256, 4, 4), (256, 16, 4))
_NARROW_SHAPES = ((32, 4, 1), (256, 16, 1))


def layer_norm(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """As reference.norm.layer_norm: residual float32[T, H] (+= delta [T, H]) -> out_dtype[T, H]."""
    check("residual", residual, torch.float32, (None, None))
    out = torch.empty(residual.shape, dtype=out_dtype, device=residual.device)
    _norm(residual, delta, weight, bias, epsilon, out)
    return out


def rms_norm(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    epsilon: float,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """As reference.norm.rms_norm: residual [..., H] of two or three dimensions.

    The first dimension may have any stride (the query heads of a packed projection).
    out: where to put the result, residual itself included.
    """
    if out is None:
        out = torch.empty(residual.shape, dtype=out_dtype, device=residual.device)
    elif out.dtype != out_dtype or out.shape != residual.shape:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}: it must be {out_dtype} {tuple(residual.shape)}"
        )
    _norm(residual, delta, weight, None, epsilon, out)
    return out


def normed_rows(residual: Tensor, delta: Tensor | None, norm: Norm) -> Fp8Rows:
    """Normalise the residual stream float32[T, H] (+= delta [T, H]) to rows of a product in FP8.

    They are rounded to bfloat16 and then as `round_rows` does.  H: a multiple of 4.
    """
    check("residual", residual, torch.float32, (None, None))
    found = Fp8Rows(
        torch.empty(residual.shape, dtype=FP8, device=residual.device),
        torch.empty(residual.shape[0], dtype=torch.float32, device=residual.device),
    )
    _norm(residual, delta, norm.weight, norm.bias, norm.epsilon, found.codes, found.scales)
    return found


def specialisations() -> Iterator[Kernel]:
    """Yield every instance that the engine uses: the stream; norms after a block; norms of query
    and key heads; rows of products in FP8."""
    shapes = (*_WIDE_SHAPES, *_NARROW_SHAPES)
    for storage in STORAGE:
        stream = {(torch.float32, delta, storage) for delta in (storage, torch.float32)}
        others = {(storage, storage, torch.float32), (storage, storage, storage)}
        for centred in (True, False):
            for dtypes in sorted(stream if centred else stream | others, key=str):
                for shape in shapes:
                    yield Kernel.of("norm", "norm", *dtypes, centred, *shape)
    for delta in (torch.bfloat16, torch.float32):
        for centred in (True, False):
            for shape in _WIDE_SHAPES:
                yield Kernel.of("norm", "norm", torch.float32, delta, FP8, centred, *shape)


def _norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    out: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Check, choose the instance and start it; scales: of a result in FP8."""
    columns = x.shape[-1]
    _check(x, delta, weight, bias, out)
    rows = x.numel() // columns
    group = x.shape[1] if x.dim() == 3 else 1
    delta_dtype = x.dtype if delta is None else delta.dtype
    if delta is None and x.dtype == torch.float32:
        delta_dtype = _rounded_dtype(out)  # any: it is not read
    width = min(4, wide_elements(columns, x, delta, weight, bias, out))
    if scales is not None and width != 4:
        raise ValueError(f"rows in FP8 of {columns} columns: give a multiple of 4, of whole loads")
    shape = _shape(columns, width)
    kernel = Kernel.of("norm", "norm", x.dtype, delta_dtype, out.dtype, bias is not None, *shape)
    per_block = WARP_ROWS if shape[0] == 32 else 1
    launch(
        kernel,
        (ceil_div(rows, per_block),),
        (shape[0], per_block),
        x,
        delta,
        weight,
        bias,
        out,
        scales,
        np.int64(rows),
        np.int32(columns),
        np.int32(group),
        np.int64(x.stride(0)),
        np.int64(out.stride(0)),
        np.float32(epsilon),
    )


def _rounded_dtype(out: Tensor) -> torch.dtype:
    """The dtype that a result is rounded to, before FP8."""
    return ROUNDED if out.dtype == FP8 else out.dtype


def _shape(columns: int, width: int) -> tuple[int, int, int]:
    """Threads of a row, vectors of a thread, elements of a vector."""
    for shape in _WIDE_SHAPES if width == 4 else _NARROW_SHAPES:
        if columns <= shape[0] * shape[1] * shape[2]:
            return shape
    limit = "16384" if width == 4 else "4096 where it is no multiple of 4"
    raise ValueError(f"a row of {columns} columns is too long to normalise: at most {limit}")


def _check(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """See check."""
    columns = x.shape[-1]
    check_storage("residual", x)
    if out.dtype != FP8:
        check_storage("out", out)
    for name, tensor in (("residual", x), ("out", out)):
        if tensor.dim() not in (2, 3) or tensor.stride(-1) != 1:
            raise ValueError(f"{name} must have two or three dimensions, its rows side by side")
        if tensor.dim() == 3 and tensor.stride(1) != columns:
            raise ValueError(f"{name}: the heads of a row must lie one after another")
    if delta is not None:
        if x.dtype != torch.float32:
            raise ValueError("residual must be float32 where a delta is added to it")
        check("delta", delta, STORAGE, x.shape, like=x)
        if delta.dtype not in (_rounded_dtype(out), torch.float32):
            raise ValueError(f"delta is {delta.dtype}: it must be {_rounded_dtype(out)} or float32")
    check("weight", weight, torch.float32, (columns,), like=x)
    if bias is not None:
        check("bias", bias, torch.float32, (columns,), like=x)
    if x.numel() // columns > INT32_MAX:
        raise ValueError(f"{x.numel() // columns} rows are more than a grid has blocks")
