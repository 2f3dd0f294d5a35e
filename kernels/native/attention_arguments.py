"""The arguments of the compiled attention, as C structures."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from nightjar.kernels.native.norm import NormArgument
from nightjar.kernels.native.pointers import INT, POINTER
from nightjar.kernels.native.tiles import ChunkTiles


class CacheLayer(ctypes.Structure):
    """One layer of the cache as attend.h takes it."""

    _fields_ = (
        *((name, POINTER) for name in ("keys", "values")),
        *((name, INT) for name in ("half", "kv_heads", "block_size", "head_size")),
    )

    @staticmethod
    def of(keys: Tensor, values: Tensor) -> CacheLayer:
        """keys, values: [blocks, Hkv, S, D], contiguous."""
        half = keys.dtype == torch.float16
        return CacheLayer(keys.data_ptr(), values.data_ptr(), half, *keys.shape[1:])


class Projection(ctypes.Structure):
    """Packed heads as qkv_post.h takes them."""

    _fields_ = (
        ("qkv", POINTER),
        ("rows", INT),
        ("heads", INT),
        ("query_norm", NormArgument),
        ("key_norm", NormArgument),
        *((name, POINTER) for name in ("cosines", "sines", "positions")),
        ("pairs", INT),
        ("blocks", POINTER),
        ("offsets", POINTER),
        ("written", INT),
    )


class Prompts(ctypes.Structure):
    """Prompt rows as prefill_attention.h takes them; tiles_held keeps the arrays alive."""

    tiles_held: ChunkTiles

    _fields_ = (
        ("q", POINTER),
        ("step", INT),
        ("heads", INT),
        ("out", POINTER),
        ("tables", POINTER),
        ("tiles", INT),
        *((name, POINTER) for name in ("first_rows", "counts", "positions", "table_starts")),
    )


class Running(ctypes.Structure):
    """Running sequences as decode_attention.h takes them."""

    _fields_ = (
        ("q", POINTER),
        ("step", INT),
        ("heads", INT),
        *((name, POINTER) for name in ("out", "tables", "table_starts", "lengths")),
        ("batch", INT),
    )


class Documents(ctypes.Structure):
    """Document rows as branch_attention.h takes them."""

    _fields_ = (
        *((name, POINTER) for name in ("q", "k", "v")),
        ("step", INT),
        ("heads", INT),
        ("out", POINTER),
        ("tables", POINTER),
        ("tiles", INT),
        *((name, POINTER) for name in ("first_rows", "counts", "table_starts", "prefix_lengths")),
        ("first_of", POINTER),
    )
