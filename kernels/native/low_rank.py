"""Products of low rank for groups of rows, compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.native.build import compiled, library
from nightjar.kernels.native.pointers import INT, POINTER, address, is_plain
from nightjar.kernels.operands import LowRank, RowGroup
from nightjar.kernels.reference import low_rank as reference

MOST_RANKS = 512
"""The padded rank up to which the compiled kernel finds room."""


def serves(y: Tensor, x: Tensor, groups: Sequence[RowGroup]) -> bool:
    """Whether this kernel takes the rows y [T, out], x [M, in] and the groups' products."""
    return (
        all(is_plain(rows) and rows.dim() == 2 and rows.stride(1) == 1 for rows in (y, x))
        and all(one.down.shape[1] <= MOST_RANKS for group in groups for one in group.products)
        and library() is not None
    )


def add_low_rank(y: Tensor, x: Tensor, rows: Tensor, groups: Sequence[RowGroup]) -> None:
    """As reference.low_rank.add_low_rank."""
    if not serves(y, x, groups):
        reference.add_low_rank(y, x, rows, groups)
        return
    if rows.dtype != torch.int64 or rows.shape != x.shape[:1] or not rows.is_contiguous():
        raise ValueError(f"rows {rows.dtype}{list(rows.shape)} of {x.shape[0]} inputs: int64[M]")
    products = [(one, group) for group in groups for one in group.products]
    for product, group in products:
        if x.shape[1] != product.down.shape[0] or y.shape[1] < product.begin + product.outputs:
            raise ValueError(
                f"{product.down.shape[0]} inputs and {product.outputs} outputs from "
                f"{product.begin} on, for x {list(x.shape)} and y {list(y.shape)}"
            )
        if not 0 <= group.begin <= group.end <= x.shape[0]:
            raise ValueError(f"rows {group.begin} to {group.end} of {x.shape[0]}")
    addresses = [ctypes.addressof(product.plan(_argument)) for product, _ in products]
    told = np.array(
        [addresses, [g.begin for _, g in products], [g.end for _, g in products]], dtype=np.int64
    )
    _function()(
        y.data_ptr(),
        y.stride(0),
        x.data_ptr(),
        x.stride(0),
        rows.data_ptr(),
        *(address(part) for part in told),
        len(products),
    )


class _LowRankArgument(ctypes.Structure):
    """A product as low_rank.cpp takes it."""

    _fields_ = (
        *((name, POINTER) for name in ("down", "up")),
        *((name, INT) for name in ("inputs", "ranks", "rank", "stride", "outputs", "begin")),
    )


def _argument(product: LowRank) -> _LowRankArgument:
    """Return the product as the kernel takes it; the caller must keep the product."""
    down, up = product.down, product.up
    if not all(is_plain(one) and one.is_contiguous() for one in (down, up)):
        raise ValueError(f"factors of {down.dtype} and {up.dtype}: contiguous float32")
    inputs, ranks = down.shape
    rank, stride = up.shape
    return _LowRankArgument(
        down.data_ptr(), up.data_ptr(), inputs, ranks, rank, stride, product.outputs, product.begin
    )


@cache
def _function() -> ctypes._NamedFuncPointer:
    function: ctypes._NamedFuncPointer = compiled().add_low_rank
    function.argtypes = [POINTER, INT, POINTER, INT, *[POINTER] * 4, INT]
    function.restype = None
    return function
