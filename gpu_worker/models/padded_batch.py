"""The rows of a step in tensors of a padded shape, which keep their addresses.

Rows that fill a shape up write to no block of the cache.  Running sequences that do have no length,
and tiles of prompts that do are no work.  So no wanted row reads anything of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nightjar import kernels
from nightjar.checkpoints import ModelConfig
from nightjar.gpu_worker.models.batch import TokenBatch
from nightjar.kernels import ChunkLayout, ChunkTensors, PagedLayout, PagedTensors

MOST_PROMPT_ROWS = 1024
"""More prompt rows are not padded: to launch them takes little beside computing them."""

MOST_CHUNKS = 64
"""Most chunks of prompts in a padded step."""

MOST_DECODE_POSITIONS = 1 << 20
"""Most slots times positions of a table: the partial results of decode attention grow with both."""

Part = tuple[str, tuple[int, ...], bool]
"""The name of a tensor of a step, its size, and whether its numbers are int64 and not int32."""


class StepShape(NamedTuple):
    """The sizes of a step's tensors.

    prompt_rows: rows of prompts, 0 for none; chunks: of prompts; chunk_blocks: blocks of a chunk's
    table; slots: running sequences; blocks: of their tables.
    """

    prompt_rows: int
    chunks: int
    chunk_blocks: int
    slots: int
    blocks: int

    @property
    def rows(self) -> int:
        """All rows."""
        return self.prompt_rows + self.slots

    @property
    def outputs(self) -> int:
        """Rows whose hidden states are computed: one a chunk and one a slot."""
        return self.chunks + self.slots


def shape_of(batch: TokenBatch) -> StepShape | None:
    """Return the smallest shape that holds a step, which is in the host's memory.

    None where its tensors are not of a padded shape: steps with documents, prompt vectors, adapters
    or blocks that are still being loaded, large steps, and those that want many rows of a prompt.
    """
    others = batch.branch, batch.prompt_vectors, batch.adapted, batch.arrivals
    if any(x is not None for x in others) or batch.output_rows is None:
        return None
    if batch.prefill is None and not batch.wants_all:
        return None
    rows = chunks = chunk_blocks = slots = blocks = positions = 0
    if isinstance(batch.prefill, ChunkLayout):
        longest = -(-int(batch.prefill.ends.max()) // batch.prefill.block_size)
        chunks = _eights(batch.prefill.starts.size, 8)
        chunk_blocks = _eights(longest, 64)
        rows = padded(max(batch.prefill.rows, chunks + 1), 16)  # more rows than outputs
    if isinstance(batch.decode, PagedLayout):
        longest = -(-int(batch.decode.lengths.max()) // batch.decode.block_size)
        slots = padded(batch.decode.lengths.size, 8)
        blocks = max(4, _power(longest))
        positions = slots * blocks * batch.decode.block_size
    shape = StepShape(rows, chunks, chunk_blocks, slots, blocks)
    fits = (
        rows <= MOST_PROMPT_ROWS
        and chunks <= MOST_CHUNKS
        and positions <= MOST_DECODE_POSITIONS
        and batch.output_rows.shape[0] <= shape.outputs
    )
    return shape if fits else None


def padded(count: int, least: int) -> int:
    """Return the next power of two, above 128 the next quarter of one: few shapes, little waste."""
    if count <= least:
        return least
    power = _power(count)
    step = power // 8 if count > 128 else power
    return -(-count // step) * step


def _power(count: int) -> int:
    """Return the next power of two."""
    return 1 << (count - 1).bit_length()


def _eights(count: int, least: int) -> int:
    """Return the next of least, 8 least, 64 least, ..."""
    while least < count:
        least *= 8
    return least


class PaddedBatch:
    """The tensors of one shape: all of them lie in one, which one copy fills.

    rows: the batch that a forward pass reads.
    """

    def __init__(
        self, shape: StepShape, config: ModelConfig, heads_dtype: torch.dtype, device: str
    ) -> None:
        """config: of the heads that the device computes; heads_dtype: of queries, keys, values."""
        self.shape = shape
        self._heads_per_kv, self._dtype = config.n_heads // config.n_kv_heads, heads_dtype
        tiles = kernels.most_prompt_tiles(
            shape.prompt_rows, shape.chunks, self._heads_per_kv, heads_dtype
        )
        self._parts = tuple(_parts(shape, tiles))
        count = sum(_words(part) for part in self._parts)
        self._numbers = torch.empty(count, dtype=torch.int64, device=device)
        self.rows = self._batch(dict(_split(self._numbers, self._parts, torch.int32)))

    def load(self, batch: TokenBatch) -> None:
        """Copy a step of this shape, which is in the host's memory; nothing stays of another."""
        numbers = np.zeros(self._numbers.shape[0], dtype=np.int64)
        to: dict[str, np.ndarray] = dict(_split(numbers, self._parts, np.int32))
        self._load_rows(to, batch)
        if isinstance(batch.prefill, ChunkLayout):
            cut = kernels.prompt_tiles(batch.prefill, self._heads_per_kv, self._dtype)
            to["tiles"][:, 0] = -1
            for name, given in cut._asdict().items():
                to[name][: given.shape[0], : given.shape[1]] = given
        if isinstance(batch.decode, PagedLayout):
            tables, lengths = batch.decode.listed()
            to["block_tables"][: tables.shape[0], : tables.shape[1]] = tables
            to["lengths"][: lengths.size] = lengths
        kernels.put(self._numbers, numbers)

    def _load_rows(self, to: dict[str, np.ndarray], batch: TokenBatch) -> None:
        """Fill in prompt rows, and running sequences behind the padding of those."""
        count = batch.prefill.rows if batch.prefill is not None else 0
        first = self.shape.prompt_rows
        to["write_blocks"].fill(-1)
        for name in ("token_ids", "positions", "write_blocks", "write_offsets"):
            given = getattr(batch, name).numpy()
            to[name][:count] = given[:count]
            to[name][first : first + given.size - count] = given[count:]
        if batch.output_rows is not None:
            wanted = batch.output_rows.numpy()
            to["output_rows"].fill(self.shape.rows - 1)
            moved = np.where(wanted < count, wanted, wanted + first - count)
            to["output_rows"][: wanted.size] = moved

    def _batch(self, found: dict[str, Tensor]) -> TokenBatch:
        """Return the batch of these tensors."""
        shape = self.shape
        prefill = decode = output_rows = None
        if shape.prompt_rows:
            tiles = found["tables"], found["spans"], found["tiles"]
            prefill = ChunkTensors(shape.prompt_rows, *tiles)
            output_rows = found["output_rows"]
        if shape.slots:
            decode = PagedTensors(found["block_tables"], found["lengths"])
        return TokenBatch(
            token_ids=found["token_ids"],
            positions=found["positions"],
            vector_bases=found["positions"],  # not read: there are no prompt vectors
            prompt_vectors=None,
            write_blocks=found["write_blocks"],
            write_offsets=found["write_offsets"],
            prefill=prefill,
            decode=decode,
            branch=None,
            output_rows=output_rows,
        )


def _parts(shape: StepShape, tiles: int) -> Iterator[Part]:
    """Yield the tensors of a step; tiles: the most of its prompts."""
    for name in ("token_ids", "positions", "write_blocks", "write_offsets"):
        yield name, (shape.rows,), True
    yield "output_rows", (shape.outputs,), True
    yield "tables", (shape.chunks, shape.chunk_blocks), False
    yield "spans", (shape.chunks, 3), False
    yield "tiles", (tiles, 2), False
    yield "block_tables", (shape.slots, shape.blocks), False
    yield "lengths", (shape.slots,), False


def _words(part: Part) -> int:
    """Return the int64 numbers that hold a tensor."""
    _, size, is_wide = part
    return math.prod(size) if is_wide else -(-math.prod(size) // 2)


def _split(numbers: Any, parts: tuple[Part, ...], narrow: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - of NumPy or of torch
    """Yield the parts of int64 numbers, of NumPy or of torch; narrow: int32 there."""
    start = 0
    for part in parts:
        name, size, is_wide = part
        own = numbers[start : start + _words(part)]
        own = own if is_wide else own.view(narrow)[: math.prod(size)]
        yield name, own.reshape(size)
        start += _words(part)
