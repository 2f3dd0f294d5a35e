"""Copies cache blocks to and from contiguous memory, in torch."""

import torch
from torch import Tensor


def kv_pack(
    keys: Tensor, values: Tensor, blocks: Tensor, packed: Tensor, slots: Tensor | None = None
) -> None:
    """Copy cache blocks out: packed[slots[i]] = (keys, values)[:, blocks[i]]; slots None: 0, 1, ..

    keys, values: [layers, n_blocks, Hkv, S, D], or [layers, n_blocks, Hkv, S] the scales of a cache
    in FP8; blocks, slots: int64[n], no slot twice; packed: [n_slots, layers, 2, ...] with the rest
    of that shape, contiguous, or some layers of such a tensor.  For a cache on a GPU it is there
    too, or in pinned memory.
    """
    both = torch.stack((keys[:, blocks], values[:, blocks]), 2)
    packed[_rows(blocks, slots)] = both.transpose(0, 1)


def kv_unpack(
    keys: Tensor, values: Tensor, blocks: Tensor, packed: Tensor, slots: Tensor | None = None
) -> None:
    """Copy cache blocks back in: the inverse of kv_pack; no block twice."""
    found = packed[_rows(blocks, slots)].transpose(0, 1)
    keys[:, blocks], values[:, blocks] = found[:, :, 0], found[:, :, 1]


def _rows(blocks: Tensor, slots: Tensor | None) -> Tensor:
    """Return the slot of every block."""
    return torch.arange(blocks.shape[0]) if slots is None else slots
