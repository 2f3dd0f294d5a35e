"""Cache blocks to and from contiguous memory, in torch."""

import torch
from torch import Tensor


def kv_pack(
    keys: Tensor, values: Tensor, blocks: Tensor, packed: Tensor, slots: Tensor | None = None
) -> None:
    """As kernels.kv_pack."""
    both = torch.stack((keys[:, blocks], values[:, blocks]), 2)
    packed[_places(blocks, slots)] = both.transpose(0, 1)


def kv_unpack(
    keys: Tensor, values: Tensor, blocks: Tensor, packed: Tensor, slots: Tensor | None = None
) -> None:
    """As kernels.kv_unpack."""
    found = packed[_places(blocks, slots)].transpose(0, 1)
    keys[:, blocks], values[:, blocks] = found[:, :, 0], found[:, :, 1]


def _places(blocks: Tensor, slots: Tensor | None) -> Tensor:
    """The slot of every block."""
    return torch.arange(blocks.shape[0]) if slots is None else slots
