"""Embedding lookup, compiled."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from nightjar.kernels.native.build import compiled, library
from nightjar.kernels.native.pointers import FLOAT, INT, POINTER, is_plain
from nightjar.kernels.reference import embedding as reference


def serves(table: Tensor, position_table: Tensor | None) -> bool:
    """Whether this kernel takes rows of these tables [V, H], [P, H]."""
    tables = (x for x in (table, position_table) if x is not None)
    return all(is_plain(x) and x.is_contiguous() for x in tables) and library() is not None


def embed(
    ids: Tensor,
    positions: Tensor,
    table: Tensor,
    position_table: Tensor | None,
    prompt_vectors: Tensor | None = None,
    vector_bases: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """As reference.embedding.embed.

    Raises:
        IndexError: An id or a position that a table has no row for.
        ValueError: Not int64, or shapes that do not fit together.
    """
    tables = table, position_table
    if prompt_vectors is None and serves(*tables):
        return _embed(ids, positions, *tables, scale)
    return reference.embed(ids, positions, *tables, prompt_vectors, vector_bases, scale)


def _embed(
    ids: Tensor, positions: Tensor, table: Tensor, position_table: Tensor | None, scale: float
) -> Tensor:
    """Compute the lookup without prompt vectors: float32[T, H]."""
    if ids.dtype != torch.int64 or positions.dtype != torch.int64:
        raise ValueError(f"{ids.dtype} ids, {positions.dtype} positions: int64")
    ids, positions = ids.contiguous(), positions.contiguous()
    n, width = ids.shape[0], table.shape[1]
    if positions.shape[0] != n or (position_table is not None and position_table.shape[1] != width):
        learned = None if position_table is None else list(position_table.shape)
        raise ValueError(
            f"{n} ids, {positions.shape[0]} positions, tables {list(table.shape)} and {learned}"
        )
    out = table.new_empty(n, width)
    done = _function()(
        table.data_ptr(),
        ids.data_ptr(),
        table.shape[0],
        scale,
        None if position_table is None else position_table.data_ptr(),
        positions.data_ptr(),
        0 if position_table is None else position_table.shape[0],
        n,
        width,
        out.data_ptr(),
    )
    if done < n:
        last = "" if position_table is None else f", {position_table.shape[0]} positions"
        raise IndexError(
            f"id {int(ids[done])} at position {int(positions[done])}: "
            f"the table has {table.shape[0]} rows{last}"
        )
    return out


@cache
def _function() -> ctypes._NamedFuncPointer:
    kernels = compiled()
    function = kernels.embed
    table = (POINTER, POINTER, INT)
    function.argtypes = [*table, FLOAT, *table, INT, INT, POINTER]
    function.restype = INT
    return function
