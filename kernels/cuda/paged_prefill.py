"""Attention of prompt rows to the pages of the cache, in one launch: see paged_prefill.cu.

Operations of T rows after L positions: 4 T L Hq D.  Bytes: of each tile of query rows, 2 L D s of
keys and values, from the second-level cache mostly.  The query heads of a key head are rows of one
tile, so a tile of 64 rows does 128 / s operations a byte: bound by the tensor cores.  FP32 is
multiplied without them, by 32 rows at a time, for exactness.

A block is 128 threads for the rows of a tile.  It walks the positions that its last row sees, 32 at
a time.  The next keys and values are on their way to registers meanwhile.  In 16 bits a block has 2
times 32 keys and values in shared memory: 37 KB at 128 channels.

A cache in FP8 has half of the bytes, 2 L (D + 1), and is widened on its way to shared memory.  So
tensor cores multiply the same 16-bit numbers as without it.

Tiles are listed on the host, those that see most positions first, so that short ones fill the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import check, check_paged
from nightjar.kernels.cuda.kernel import FP8, HEAD_SIZES, STORAGE, Kernel
from nightjar.kernels.cuda.launch import launch
from nightjar.kernels.cuda.qkv_post import scale_arguments
from nightjar.kernels.heads import CacheScales
from nightjar.kernels.layout import ChunkTensors, Tables
from nightjar.kernels.upload import upload_together

THREADS = 128

TILE_ROWS = {torch.float16: 64, torch.bfloat16: 64, torch.float32: 32}
"""Query rows of a block, by storage."""

MOST_TILES = 65535
"""Blocks of a grid along y."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of one sequence: `first` of q, how many, and the positions that the first of
    them sees."""

    first: int
    rows: int
    seen: int


class TileArrays(NamedTuple):
    """Spans in the host's memory, cut into tiles.

    tables: int32[n, W], the blocks of each span's sequence; spans: int32[n, 3], as Span; tiles:
    int32[M, 2], a span (-1: no work) and the first of its query rows, counted over tokens and the
    query heads of a key head.
    """

    tables: np.ndarray
    spans: np.ndarray
    tiles: np.ndarray

    @staticmethod
    def of(
        tables: Tables,
        spans: Sequence[Span],
        widths: Sequence[int],
        heads_per_kv: int,
        tile_rows: int,
    ) -> TileArrays:
        """Cut spans into tiles of `tile_rows` query rows.

        widths: of each table, the blocks that the span's rows see.
        """
        listed = np.zeros((len(spans), max(1, *widths)), dtype=np.int32)
        for i, width in enumerate(widths):
            listed[i, :width] = tables.table(i, width)
        triples = np.array([(one.first, one.rows, one.seen) for one in spans], dtype=np.int32)
        counts = -(-triples[:, 1] * heads_per_kv // tile_rows)
        owners = np.repeat(np.arange(len(spans)), counts)
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        begins = (np.arange(owners.size) - firsts) * tile_rows
        sees = triples[owners, 2] + begins // heads_per_kv
        order = np.argsort(-sees, kind="stable")
        tiles = np.stack((owners, begins), axis=1)[order].astype(np.int32)
        return TileArrays(listed, triples, tiles)

    def on(self, device: torch.device) -> Tiles:
        """Return the tiles on a device, brought there by one copy."""
        return Tiles(*upload_together([torch.from_numpy(x) for x in self], device))


@dataclass(frozen=True, slots=True)
class Tiles:
    """TileArrays on the device."""

    tables: Tensor
    spans: Tensor
    tiles: Tensor


def most_tiles(rows: int, spans: int, heads_per_kv: int, dtype: torch.dtype) -> int:
    """Return the most tiles of so many rows in so many spans; each span may end within a tile."""
    return rows * heads_per_kv // TILE_ROWS[dtype] + spans


def paged_prefill(  # noqa: PLR0913 - rows, cache, layout
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tiles | ChunkTensors,
    scale: float,
    *,
    causal: bool,
    lse: Tensor | None = None,
    scales: CacheScales | None = None,
) -> Tensor:
    """Attention of spans of rows to the cached positions of their sequences.

    q: [T, Hq, D], rows at any stride; keys, values: [blocks, Hkv, S, D], one layer, S a power of
    two; causal: each row of a span sees one position more than the row before it; else all see the
    same.  A row that sees nothing is 0.
    lse: float32[T, Hq], filled with the log-sum-exp of the scores, for merge_attention; scales: of
    a cache in FP8.
    Returns [T, Hq, D] in q's dtype; rows of no span are not written.  A row's bits depend on its
    own sequence alone.
    """
    _check(q, keys, values, scales, tiles)
    if lse is not None:
        check("lse", lse, torch.float32, q.shape[:2], like=q)
    rows, heads, head_size = q.shape
    kv_heads, block_size = keys.shape[1:3]
    out = torch.empty(rows, heads, head_size, dtype=q.dtype, device=q.device)
    launch(
        _instance(q.dtype, keys.dtype, head_size),
        (kv_heads, tiles.tiles.shape[0]),
        (THREADS,),
        q,
        np.int64(q.stride(0)),
        keys,
        values,
        *scale_arguments(scales),
        tiles.tables,
        np.int32(tiles.tables.shape[1]),
        tiles.spans,
        tiles.tiles,
        np.int32(kv_heads),
        np.int32(heads // kv_heads),
        np.int32(block_size.bit_length() - 1),
        np.int32(causal),
        np.float32(scale),
        out,
        lse,
    )
    return out


def specialisations() -> Iterator[Kernel]:
    """Yield every instance that the engine uses."""
    for storage in STORAGE:
        for cached in (storage, FP8):
            for head_size in HEAD_SIZES:
                yield _instance(storage, cached, head_size)


def _instance(storage: torch.dtype, cached: torch.dtype, head_size: int) -> Kernel:
    """storage: of the query rows; cached: of the cache."""
    return Kernel.of("paged_prefill", "paged_prefill", storage, cached, head_size)


def _check(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: CacheScales | None,
    tiles: Tiles | ChunkTensors,
) -> None:
    """See check."""
    check_paged(q, keys, values, scales)
    spans = tiles.spans.shape[0]
    check("spans", tiles.spans, torch.int32, (None, 3), like=q)
    check("tables", tiles.tables, torch.int32, (spans, None), like=q)
    check("tiles", tiles.tiles, torch.int32, (None, 2), like=q)
    if tiles.tiles.shape[0] > MOST_TILES:
        raise ValueError(f"{tiles.tiles.shape[0]} tiles: at most {MOST_TILES} at once")
