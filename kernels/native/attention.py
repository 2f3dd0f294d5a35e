"""Attention over the paged cache, compiled: prompts, running sequences, documents.

Each row runs its own softmax over its own keys, in pieces that begin at fixed positions of the
sequence.  So a row's bits depend on nothing else in the step.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.heads import CacheScales, CacheWrite, HeadNorms, Rotation
from nightjar.kernels.layout import (
    BranchLayout,
    ChunkLayout,
    ChunkTensors,
    PagedLayout,
    PagedTensors,
    StepRows,
)
from nightjar.kernels.native.attention_arguments import (
    CacheLayer,
    Documents,
    Projection,
    Prompts,
    Running,
)
from nightjar.kernels.native.build import compiled, library
from nightjar.kernels.native.norm import NormArgument
from nightjar.kernels.native.pointers import FLOAT, address, by_row, is_plain
from nightjar.kernels.native.tiles import BranchTiles, ChunkTiles
from nightjar.kernels.reference import attention as whole_reference
from nightjar.kernels.reference import branch as branch_reference
from nightjar.kernels.reference import decode as decode_reference
from nightjar.kernels.reference import prefill as prefill_reference

HEAD_SIZE_STEP = 16
"""Heads are read in whole registers."""


def serves(q: Tensor, cache_keys: Tensor) -> bool:
    """Whether these kernels take rows like q and a cache [blocks, Hkv, S, D] of the same dtype.

    They take no cache in FP8, whose bytes are uint8.
    """
    return (
        q.device.type == "cpu"
        and q.dtype == cache_keys.dtype
        and q.dtype in (torch.float32, torch.float16)
        and cache_keys.shape[-1] % HEAD_SIZE_STEP == 0
        and cache_keys.is_contiguous()
        and library() is not None
    )


def attend(
    qkv: Tensor,
    norms: HeadNorms | None,
    rotation: Rotation | None,
    cache: CacheWrite,
    rows: StepRows,
    scale: float,
) -> Tensor:
    """As reference.attention.attend."""
    if not serves(qkv, cache.keys):
        if qkv.dtype == torch.float16:  # in FP32 these kernels may take it
            return attend(qkv.float(), norms, rotation, cache, rows, scale).half()
        return whole_reference.attend(qkv, norms, rotation, cache, rows, scale)
    heads = qkv.shape[1] - 2 * cache.keys.shape[1]
    out = qkv.new_empty(qkv.shape[0], heads, qkv.shape[2])
    projection = projected(qkv, heads, norms, rotation, cache)
    attending = attending_rows(qkv, out, cache, rows)
    _attend(cache.keys, cache.values, projection, *attending, scale)
    return out


def attending_rows(
    qkv: Tensor, out: Tensor, write: CacheWrite, rows: StepRows
) -> tuple[Prompts | None, Running | None, Documents | None]:
    """Return the rows of a step as the kernels take them.

    qkv: [T, Hq + 2 Hkv, D], contiguous; out: [T, Hq, D].  The result points into qkv, out and rows.
    """
    n_heads, heads, size = qkv.shape[1], out.shape[1], qkv.shape[2]
    width, head = n_heads * size, qkv.itemsize * size
    from_row, to_row = n_heads * head, heads * head
    q, result = qkv.data_ptr(), out.data_ptr()
    prompts = running = documents = None
    if rows.prefill is not None:
        if not isinstance(rows.prefill, ChunkLayout):
            raise TypeError("a layout on a device: give a ChunkLayout")
        tiles = _prompt_tiles(rows.prefill, rows.wanted)
        prompts = Prompts(q, width, heads, result, *tiles.addresses)
        prompts.tiles_held = tiles
    if rows.decode is not None:
        if not isinstance(rows.decode, PagedLayout):
            raise TypeError("a layout on a device: give a PagedLayout")
        first = rows.prefill_rows
        running = Running(
            q + first * from_row, width, heads, result + first * to_row, *_paged(rows.decode)
        )
    if rows.branch is not None:
        first = write.blocks.shape[0]
        q += first * from_row
        k, v = q + heads * head, q + (n_heads + heads) // 2 * head
        branches = rows.branch.plan(BranchTiles.of).addresses
        documents = Documents(q, k, v, width, heads, result + first * to_row, *branches)
    return prompts, running, documents


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: ChunkLayout | ChunkTensors,
    scale: float,
    scales: CacheScales | None = None,
) -> Tensor:
    """As reference.prefill.prefill_attention."""
    if isinstance(layout, ChunkTensors) or not serves(q, keys):
        return prefill_reference.prefill_attention(q, keys, values, layout, scale, scales)
    q, out = by_row(q), q.new_empty(q.shape)
    tiles = layout.plan(ChunkTiles.of)
    prompts = Prompts(q.data_ptr(), q.stride(0), q.shape[1], out.data_ptr(), *tiles.addresses)
    _attend(keys, values, None, prompts, None, None, scale)
    return out


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: PagedLayout | PagedTensors,
    scale: float,
    scales: CacheScales | None = None,
) -> Tensor:
    """As reference.decode.decode_attention."""
    if isinstance(layout, PagedTensors) or not serves(q, keys):
        return decode_reference.decode_attention(q, keys, values, layout, scale, scales)
    q, out = by_row(q), q.new_empty(q.shape)
    running = Running(q.data_ptr(), q.stride(0), q.shape[1], out.data_ptr(), *_paged(layout))
    _attend(keys, values, None, None, running, None, scale)
    return out


def branch_attention(  # noqa: PLR0913, PLR0917 - rows, cache, layout
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: BranchLayout,
    scale: float,
    scales: CacheScales | None = None,
) -> Tensor:
    """As reference.branch.branch_attention."""
    if not serves(q, keys):
        return branch_reference.branch_attention(q, k, v, keys, values, layout, scale, scales)
    q, k, v, out = by_row(q), by_row(k), by_row(v), q.new_empty(q.shape)
    if not q.stride(0) == k.stride(0) == v.stride(0):
        raise ValueError(f"rows of q, k, v lie {q.stride(0)}, {k.stride(0)}, {v.stride(0)} apart")
    pointers = (x.data_ptr() for x in (q, k, v))
    tiles = layout.plan(BranchTiles.of)
    documents = Documents(*pointers, q.stride(0), q.shape[1], out.data_ptr(), *tiles.addresses)
    _attend(keys, values, None, None, None, documents, scale)
    return out


def _prompt_tiles(layout: ChunkLayout, wanted: Tensor | None) -> ChunkTiles:
    if wanted is None:
        return layout.plan(ChunkTiles.of)
    rows = wanted.numpy()
    return ChunkTiles.holding(layout, rows[: np.searchsorted(rows, layout.rows)])


def _paged(layout: PagedLayout) -> tuple[int, ...]:
    """Return the last fields of `Running`."""
    return layout.plan(_paged_addresses)


def _paged_addresses(layout: PagedLayout) -> tuple[int, ...]:
    arrays = layout.tables.blocks, layout.tables.starts, layout.lengths
    return *map(address, arrays), layout.lengths.size


def projected(
    qkv: Tensor,
    heads: int,
    norms: HeadNorms | None,
    rotation: Rotation | None,
    write: CacheWrite,
) -> Projection:
    """Return qkv [T, Hq + 2 Hkv, D] as the kernels take it, and where its keys and values go."""
    if not qkv.is_contiguous():
        raise ValueError(f"qkv with strides {qkv.stride()}: contiguous")
    query_norm = key_norm = NormArgument()
    cosines = sines = positions = None
    pairs = 0
    if norms is not None:
        query_norm, key_norm = (
            NormArgument.of(weight, None, norms.epsilon) for weight in (norms.query, norms.key)
        )
        if not query_norm.size == key_norm.size == qkv.shape[2]:
            sizes = f"{query_norm.size} and {key_norm.size}"
            raise ValueError(f"norms of {sizes} for heads of {qkv.shape[2]}")
    if rotation is not None:
        cosines, sines = _numbers(rotation.cosines), _numbers(rotation.sines)
        positions = rotation.positions.data_ptr()
        pairs = rotation.cosines.shape[1]
    return Projection(
        qkv.data_ptr(),
        qkv.shape[0],
        heads,
        query_norm,
        key_norm,
        cosines,
        sines,
        positions,
        pairs,
        write.blocks.data_ptr(),
        write.offsets.data_ptr(),
        write.blocks.shape[0],
    )


def _numbers(x: Tensor) -> int:
    """Return the address of contiguous FP32 numbers."""
    if not (is_plain(x) and x.is_contiguous()):
        raise ValueError(f"{x.dtype}{list(x.shape)} on {x.device}: contiguous float32 on the CPU")
    return x.data_ptr()


def _attend(
    keys: Tensor,
    values: Tensor,
    projection: Projection | None,
    prompts: Prompts | None,
    running: Running | None,
    documents: Documents | None,
    scale: float,
) -> None:
    layer = CacheLayer.of(keys, values)
    _function()(layer, projection, prompts, running, documents, scale)


@cache
def _function() -> ctypes._NamedFuncPointer:
    kernels = compiled()
    function = kernels.attend
    structures = (CacheLayer, Projection, Prompts, Running, Documents)
    function.argtypes = [*map(ctypes.POINTER, structures), FLOAT]
    function.restype = None
    return function
