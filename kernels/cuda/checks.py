"""Checks of kernels' arguments: a wrong tensor is refused before a kernel reads out of bounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nightjar.kernels.cuda.kernel import FP8, HEAD_SIZES, STORAGE
from nightjar.kernels.heads import CacheScales

INT32_MAX = 2**31 - 1


def check(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | None],
    *,
    like: Tensor | None = None,
    strided: bool = False,
) -> None:
    """Check dtype, shape (None: any size), device, and that the tensor is contiguous.

    strided: rows may lie apart, but each row is contiguous.

    Raises:
        ValueError: It does not fit; says which argument, what it is and what it must be.
    """
    if _fits(tensor, dtype, shape, like, strided):
        return
    allowed = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    if tensor.dtype not in allowed:
        wanted = " or ".join(str(one).removeprefix("torch.") for one in allowed)
        raise ValueError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}: give {wanted}")
    if not _has_shape(tensor, shape):
        wanted = "x".join("?" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it must be {wanted}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, the rest on {like.device}: move it there")
    if strided:
        raise ValueError(f"{name}: the elements of a row must lie side by side; copy it first")
    raise ValueError(f"{name} is not contiguous: call .contiguous() first")


def _fits(
    tensor: Tensor,
    dtype: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | None],
    like: Tensor | None,
    strided: bool,
) -> bool:
    """Check as fast as possible: a step starts hundreds of kernels, each with ten tensors."""
    if tensor.dtype is not dtype and (isinstance(dtype, torch.dtype) or tensor.dtype not in dtype):
        return False
    if not _has_shape(tensor, shape):
        return False
    if like is not None and tensor.get_device() != like.get_device():
        return False
    if strided:
        return tensor.stride(-1) == 1 or not tensor.numel()
    return tensor.is_contiguous()


def _has_shape(tensor: Tensor, shape: Sequence[int | None]) -> bool:
    sizes = tensor.shape
    if len(sizes) != len(shape):
        return False
    for size, wanted in zip(sizes, shape, strict=True):
        if wanted is not None and size != wanted:
            return False
    return True


def check_storage(name: str, tensor: Tensor) -> None:
    """Check that the dtype is one of those of weights and activations."""
    if tensor.dtype not in STORAGE:
        raise ValueError(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}: "
            "give float16, bfloat16 or float32"
        )


def check_cache(
    keys: Tensor,
    values: Tensor,
    scales: CacheScales | None,
    shape: Sequence[int | None],
    like: Tensor,
) -> None:
    """Check one layer of the cache: of the rows' dtype, or in FP8 with its scales.

    Raises:
        ValueError: See check.
    """
    dtype = like.dtype if scales is None else FP8
    check("keys", keys, dtype, shape, like=like)
    check("values", values, dtype, keys.shape, like=like)
    if scales is not None:
        check("scales of keys", scales.keys, torch.uint8, keys.shape[:-1], like=like)
        check("scales of values", scales.values, torch.uint8, keys.shape[:-1], like=like)


def check_paged(q: Tensor, keys: Tensor, values: Tensor, scales: CacheScales | None) -> None:
    """Check query heads [T, Hq, D] and the layer of the cache [blocks, Hkv, S, D] that they read.

    Raises:
        ValueError: See check.
    """
    check_storage("q", q)
    check("q", q, q.dtype, (None, None, None), strided=True)
    rows, heads, head_size = q.shape
    if head_size not in HEAD_SIZES:
        raise ValueError(f"heads of {head_size} channels: there are kernels for {HEAD_SIZES}")
    if (rows > 1 and q.stride(0) * q.element_size() % 16) or q.data_ptr() % 16:
        raise ValueError("q: every row must begin at a multiple of 16 bytes; copy it first")
    if q.stride(1) != head_size:
        raise ValueError("q: the heads of a row must lie one after another; copy it first")
    check_cache(keys, values, scales, (None, None, None, head_size), like=q)
    kv_heads, block_size = keys.shape[1:3]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads evenly")
    if block_size & (block_size - 1):
        raise ValueError(f"cache blocks of {block_size} positions: take a power of two")
    if keys.numel() // head_size > INT32_MAX:
        raise ValueError(f"a cache of {keys.numel() // head_size} rows: at most {INT32_MAX}")


def wide_elements(columns: int, *tensors: Tensor | None) -> int:
    """Return how many elements one load takes: as many as 16 bytes of the widest dtype hold.

    It is 1 where a row's length, stride or address is not a multiple of that.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    width = 16 // max([tensor.element_size() for tensor in given])
    if columns % width:
        return 1
    for tensor in given:
        if tensor.data_ptr() % (width * tensor.element_size()):
            return 1
        if any(stride % width for stride in tensor.stride()[:-1]):
            return 1
    return width


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)
