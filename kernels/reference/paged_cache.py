"""Writes keys and values into the paged cache."""

from torch import Tensor


def kv_write(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor
) -> None:
    """Store the keys and values of packed rows, in place.

    keys, values: [blocks, Hkv, S, D], one layer of the cache; k, v: [T, Hkv, D];
    blocks, offsets: int64[T], the cache block of each row and its offset in the block.
    """
    keys[blocks, :, offsets] = k.to(keys.dtype)
    values[blocks, :, offsets] = v.to(values.dtype)
