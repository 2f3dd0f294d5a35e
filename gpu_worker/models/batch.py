"""The input of one forward pass: packed tokens, what they attend to, and the cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nightjar import kernels
from nightjar.checkpoints import ModelConfig
from nightjar.kernels import (
    AdaptedRows,
    BranchLayout,
    CacheScales,
    CacheWrite,
    ChunkLayout,
    ChunkTensors,
    PagedLayout,
    PagedTensors,
)


class Arrivals(Protocol):
    """Blocks that are being loaded into the cache, layer by layer."""

    def wait(self, layer: int) -> None:
        """Make later computation wait for the keys and values of this layer (-1: of all)."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The packed rows of one step: prefill rows, then decode rows, then document rows.

    token_ids, positions, vector_bases: int64[T] (see kernels.embed); prompt_vectors:
    float32[R, H], the sets that these rows read; None where they read none.
    write_blocks, write_offsets: int64[C], where the keys and values of the first C rows (prefill
    and decode; documents are not cached) go.
    output_rows: int64[N], ascending, the rows whose last hidden state is wanted; None for all.
    prefill, decode: on the device, where the step's tensors have fixed addresses.
    arrivals: blocks that the step reads and that are still being loaded.
    adapted: the rows that LoRA adapters change; None where no request names one.
    """

    token_ids: Tensor
    positions: Tensor
    vector_bases: Tensor
    prompt_vectors: Tensor | None
    write_blocks: Tensor
    write_offsets: Tensor
    prefill: ChunkLayout | ChunkTensors | None
    decode: PagedLayout | PagedTensors | None
    branch: BranchLayout | None
    output_rows: Tensor | None
    arrivals: Arrivals | None = None
    adapted: AdaptedRows | None = None

    @property
    def wants_all(self) -> bool:
        """Whether every row is wanted, as in a step that only decodes."""
        return self.output_rows is None or self.output_rows.shape[0] == self.token_ids.shape[0]

    def to(self, device: str) -> TokenBatch:
        """Return the same rows on a device; a backend moves the layouts that it needs."""
        given = {
            field.name: value
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        vectors = given.pop("prompt_vectors", None)
        found = kernels.upload_together(list(given.values()), device)
        moved: dict[str, Any] = dict(zip(given, found, strict=True))
        if vectors is not None:
            moved["prompt_vectors"] = kernels.upload(vectors, device)
        if self.adapted is not None:
            moved["adapted"] = self.adapted.to(device)
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class KVTensors:
    """The paged cache of every layer: keys and values, each [layers, blocks, Hkv, S, D].

    scales: of a cache in FP8, whose keys and values are bytes; uint8[layers, blocks, Hkv, S] each
    (see kernels.CacheScales).
    """

    keys: Tensor
    values: Tensor
    scales: CacheScales | None = None

    @staticmethod
    def allocate(
        config: ModelConfig,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        *,
        fp8: bool = False,
    ) -> KVTensors:
        """Allocate blocks of zeros; on the CPU memory is taken only when a block is used.

        dtype: of keys and values, unless they are in FP8.
        """
        rows = (config.n_layers, blocks, config.n_kv_heads, block_size)
        shape = (*rows, config.head_size)
        if not fp8:
            return KVTensors(_zeros(shape, dtype, device), _zeros(shape, dtype, device))
        keys, values = (_zeros(shape, torch.uint8, device) for _ in range(2))
        scales = CacheScales(*(_zeros(rows, torch.uint8, device) for _ in range(2)))
        return KVTensors(keys, values, scales)

    @property
    def pairs(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """All tensors that hold blocks, [layers, blocks, ...]: of keys and of values each."""
        both = self.keys, self.values
        return (both,) if self.scales is None else (both, (self.scales.keys, self.scales.values))

    def written(
        self, blocks: Tensor, offsets: Tensor, layer: int | slice = slice(None)
    ) -> CacheWrite:
        """Return where the rows of a step go: of one layer, or of all."""
        scales = self.scales
        if scales is not None:
            scales = CacheScales(scales.keys[layer], scales.values[layer])
        return CacheWrite(self.keys[layer], self.values[layer], blocks, offsets, scales)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks: (source, copy)."""
        if pairs:
            sources, copies = kernels.upload(torch.tensor(pairs), self.keys.device).unbind(1)
            for tensor in chain.from_iterable(self.pairs):
                tensor.index_copy_(1, copies, tensor.index_select(1, sources))

    def clear(self, blocks: list[int]) -> None:
        """Zero these blocks."""
        if blocks:
            index = kernels.upload(torch.tensor(blocks), self.keys.device)
            for tensor in chain.from_iterable(self.pairs):
                tensor.index_fill_(1, index, 0)

    @staticmethod
    def block_bytes(
        config: ModelConfig, block_size: int, dtype: torch.dtype, *, fp8: bool = False
    ) -> int:
        """Bytes of one block over all layers, keys and values together, as `allocate` takes."""
        rows = config.n_layers * config.n_kv_heads * block_size
        scale = torch.uint8.itemsize
        row = config.head_size + scale if fp8 else config.head_size * dtype.itemsize
        return 2 * rows * row


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros; on the CPU in memory that the system clears at the first access."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
