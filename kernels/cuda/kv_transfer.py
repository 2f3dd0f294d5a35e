"""Cache blocks to and from contiguous memory: see kv_transfer.cu.

Bytes: twice the size of the blocks, no operations.  It is for `packed` in pinned host memory.  The
bus moves about 50 GB/s with a latency of 2 us: 0.1 MB in flight.  A few blocks of threads keep 0.5
MB in flight on few multiprocessors.  More of them would fill all multiprocessors with threads that
wait for the bus, and delay computation.  On the device it copies some hundred GB/s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import ceil_div, check
from nightjar.kernels.cuda.kernel import STORAGE, Kernel
from nightjar.kernels.cuda.launch import launch

THREADS = 256
PIECE = 4 * THREADS
"""Words that a block has in flight: 16 KB."""

BLOCKS = 32
"""The most blocks of a launch."""

WORD_BYTES = 16


def kv_pack(
    keys: Tensor, values: Tensor, blocks: Tensor, packed: Tensor, slots: Tensor | None = None
) -> None:
    """Copy cache blocks out: packed[slots[i]] = (keys, values)[:, blocks[i]]; slots None: 0, 1, ..

    keys, values: [layers, n_blocks, Hkv, S, D], or [layers, n_blocks, Hkv, S] the scales of a cache
    in FP8; blocks, slots: int64[n], no slot twice; packed: [n_slots, layers, 2, ...] with the rest
    of that shape, contiguous or some layers of what is, on the device or in pinned host memory.
    """
    _transfer(keys, values, blocks, packed, slots, pack=True)


def kv_unpack(
    keys: Tensor, values: Tensor, blocks: Tensor, packed: Tensor, slots: Tensor | None = None
) -> None:
    """Copy cache blocks back in: the inverse of kv_pack."""
    _transfer(keys, values, blocks, packed, slots, pack=False)


def specialisations() -> Iterator[Kernel]:
    """Yield every instance that the engine uses."""
    for pack in (True, False):
        yield Kernel.of("kv_transfer", "kv_transfer", pack)


def _transfer(
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    packed: Tensor,
    slots: Tensor | None,
    *,
    pack: bool,
) -> None:
    """Check and start."""
    check("keys", keys, (*STORAGE, torch.uint8), (None,) * keys.dim())
    check("values", values, keys.dtype, keys.shape, like=keys)
    check("blocks", blocks, torch.int64, (None,), like=keys)
    layers, n_blocks, *block = keys.shape
    count = blocks.shape[0]
    if slots is not None:
        check("slots", slots, torch.int64, (count,), like=keys)
    n_slots = count if slots is None else None
    check("packed", packed, keys.dtype, (n_slots, layers, 2, *block), strided=True)
    if packed.numel() and not packed[0].is_contiguous():
        raise ValueError("packed: the layers of a slot must lie one after another")
    block_bytes = math.prod(block) * keys.element_size()
    if block_bytes % WORD_BYTES or any(x.data_ptr() % WORD_BYTES for x in (keys, values, packed)):
        raise ValueError(f"cache blocks of {block_bytes} bytes must be whole words of {WORD_BYTES}")
    words = block_bytes // WORD_BYTES
    pieces = count * 2 * layers * ceil_div(words, PIECE)
    launch(
        Kernel.of("kv_transfer", "kv_transfer", pack),
        (min(BLOCKS, pieces),),
        (THREADS,),
        *(x.view(torch.int32) for x in (keys, values)),
        blocks,
        slots,
        packed.view(torch.int32),
        np.int64(pieces),
        np.int32(2 * layers),
        np.int64(n_blocks),
        np.int64(packed.stride(0) * keys.element_size() // WORD_BYTES),
        np.int32(words),
    )
