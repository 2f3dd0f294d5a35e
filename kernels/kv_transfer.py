"""Cache blocks to and from the host's memory, by whichever backend serves the cache."""

from torch import Tensor

from nightjar.kernels import cuda_ops, reference
from nightjar.kernels.cuda.launch import serves


def kv_pack(
    keys: Tensor, values: Tensor, blocks: Tensor, packed: Tensor, slots: Tensor | None = None
) -> None:
    """Copy cache blocks out: packed[slots[i]] = (keys, values)[:, blocks[i]]; slots None: 0, 1, ..

    keys, values: [layers, n_blocks, Hkv, S, D]; blocks, slots: int64[n], no slot twice;
    packed: [n_slots, layers, 2, Hkv, S, D], contiguous or some layers of what is; beside a cache on
    a GPU there too, or in pinned memory.
    """
    backend = cuda_ops if serves(keys) else reference.kv_transfer
    backend.kv_pack(keys, values, blocks, packed, slots)


def kv_unpack(
    keys: Tensor, values: Tensor, blocks: Tensor, packed: Tensor, slots: Tensor | None = None
) -> None:
    """Copy cache blocks back in: the inverse of kv_pack; no block twice."""
    backend = cuda_ops if serves(keys) else reference.kv_transfer
    backend.kv_unpack(keys, values, blocks, packed, slots)
