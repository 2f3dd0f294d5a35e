"""A weight times up to 8 rows, with the operations before and after it: see linear.cu.

Bytes of M rows, K inputs and N channels of s bytes: N K s, the weight, read once from memory.
Every block reads the rows from cache (M K s, with a norm M K (4 to 12) as well), and two blocks run
on a multiprocessor.  At K 2048 and M 8 that is 4 of 25 MB for an N of 6144.  There are 2 M N K
operations on tensor cores, part of them for missing rows: far below what tensor cores can do.

A decode step of few rows has many kernels with little to read: waiting costs more than work.  So
the kernel includes what surrounds a product: the norm before it, and the activation, the gate or
the addition to the residual stream after it.  A block loads 64 KB of weights before the norm begins
and while sums are added up.  It also loads early what a result is added to.  From 9 rows on cuBLAS
is faster.

Between two products memory would be idle for the launch, the first access and the last sums, as
long as 11 MB take.  So each block ends with a prefetch of what the next product's blocks load
first, 17 MB at most, into the second-level cache (compute capability 9.0 and later: PTX ISA,
cp.async.bulk.prefetch.L2).  It changes no result.

Weights in FP8 are half as many bytes.  Each block first rounds the rows to FP8, into its shared
memory, while its first weights are on their way.  So no launch comes before the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.activation import KINDS
from nightjar.kernels.cuda.checks import ceil_div, check
from nightjar.kernels.cuda.device import block_shared_bytes, multiprocessors
from nightjar.kernels.cuda.kernel import FP8, Argument, Kernel
from nightjar.kernels.cuda.launch import launch
from nightjar.kernels.cuda.product_rows import ROUNDED
from nightjar.kernels.cuda.switches import current
from nightjar.kernels.operands import LinearWeight, Norm

MAX_ROWS = 8
"""Columns of a tensor core's product: up to here another row costs almost nothing."""

MAX_NORMED_INPUTS = 8192
"""Of a product with a norm before it, where shared memory holds them: see most_normed_inputs."""

STORAGE = (torch.float16, torch.bfloat16)
THREADS = 256
TILE = 16
SHARE = 2048
"""Inputs of 16 bits that the warps of a block divide at a time; of FP8 twice as many."""

PAD_BYTES = 64
SUMS_BYTES = 8192
"""Bytes of shared memory for every shape."""

BLOCKS_PER_MULTIPROCESSOR = 2
RESERVED_BYTES = 1024
"""Bytes of shared memory that the system takes from each block.  A multiprocessor has so much more
than one block may have."""


class Factor(NamedTuple):
    """A weight [N, K], its bias [N] if it has one, and the scales of its channels, float32[N].

    Only a weight in FP8, of bytes, has scales.  A bias has the rows' dtype.
    """

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None

    @property
    def rows_dtype(self) -> torch.dtype:
        """The dtype of its rows."""
        return self.weight.dtype if self.scales is None else ROUNDED


Next: TypeAlias = tuple[Tensor, ...]
"""The weights of the product after this one: one, or of a gated one two of the same shape; none
where it is not known.  They may be of another dtype."""

Target: TypeAlias = tuple[Tensor, bool]
"""Where a result goes, [M, N] of the weight's dtype or float32, and whether it is added to what is
there, in float32."""


def serves_weight(weight: Tensor) -> bool:
    """Whether `linear` takes a weight [N, K]: of 16 bits or in FP8, of whole loads."""
    return (
        weight.dtype in (*STORAGE, FP8)
        and weight.shape[1] * weight.element_size() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )


def serves_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` takes x [M, K] or a stream [M, K] for the weight: few rows, of whole loads.

    The rule depends only on shapes and dtypes, so that a model always takes the same path.  Rows in
    FP8 must fit into a block's shared memory.
    """
    return (
        x.shape[0] <= MAX_ROWS
        and serves_weight(weight)
        and x.data_ptr() % 16 == 0
        and x.stride(0) * x.element_size() % 16 == 0
        and (weight.dtype != FP8 or weight.shape[1] <= _most_staged_inputs(x, FP8.itemsize))
    )


def serves_norm(stream: Tensor, weight: Tensor) -> bool:
    """Whether `normed_linear` takes them too."""
    return weight.shape[1] <= most_normed_inputs(stream) and serves_rows(stream, weight)


def most_normed_inputs(stream: Tensor) -> int:
    """Return the inputs of which 8 normalised rows of 16 bits fit into a block's shared memory.

    The sums need room too: 8192 inputs fit into 163 KB, 5792 into 99.  It is 8 rows for any batch,
    so that a model always takes the same path.
    """
    return min(MAX_NORMED_INPUTS, _most_staged_inputs(stream, 2))


def _most_staged_inputs(x: Tensor, size: int) -> int:
    """Return the inputs of which 8 rows of `size` bytes a number fit into shared memory."""
    room = block_shared_bytes(x) - SUMS_BYTES
    return (room // MAX_ROWS - PAD_BYTES) // size


def followers(after: LinearWeight) -> Next | None:
    """Return what to prefetch of a weight; None where the kernel cannot prefetch it."""
    found = after.prefetched
    return found if all(map(serves_weight, found)) else None


def linear(
    x: Tensor,
    factor: Factor,
    activation: str | None = None,
    gate: Factor | None = None,
    following: Next = (),
    *,
    wide: bool = False,
) -> Tensor:
    """activation(x @ weight + bias) of x [M, K], its rows at any stride -> [M, N] in x's dtype.

    A weight in FP8 takes rows in bfloat16, and rounds each to FP8 (reference/fp8_linear.py).
    wide: the result is float32 and not rounded.
    gate: of the weight's shape; then activation(x @ gate) * (x @ weight) (arXiv 2002.05202).
    following: weights that are likely to be read next; they are prefetched.
    A row's bits do not depend on the others.

    Raises:
        ValueError: an unknown activation, or a tensor that does not fit.
    """
    factor = Factor(*factor)
    weight = factor.weight
    check("x", x, factor.rows_dtype, (None, weight.shape[-1]), strided=True)
    dtype = torch.float32 if wide else x.dtype
    out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)
    _linear(x, None, factor, gate, activation, (out, False), following)
    return out


def linear_onto(residual: Tensor, x: Tensor, factor: Factor, following: Next = ()) -> None:
    """Add x [M, K] @ weight + bias to the residual stream, float32[M, N]: see `linear`."""
    factor = Factor(*factor)
    weight = factor.weight
    check("x", x, factor.rows_dtype, (residual.shape[0], weight.shape[-1]), strided=True)
    check("residual", residual, torch.float32, (x.shape[0], weight.shape[0]), like=x)
    _linear(x, None, factor, None, None, (residual, True), following)


def normed_linear(
    residual: Tensor,
    norm: Norm,
    factor: Factor,
    activation: str | None = None,
    gate: Factor | None = None,
    following: Next = (),
) -> Tensor:
    """`linear` of the normalised residual stream, float32[M, K]; the normalised rows are rounded to
    the rows' dtype first."""
    factor = Factor(*factor)
    weight = factor.weight
    check("residual", residual, torch.float32, (None, weight.shape[-1]))
    check("norm", norm.weight, torch.float32, (weight.shape[-1],), like=residual)
    if norm.bias is not None:
        check("bias of the norm", norm.bias, torch.float32, (weight.shape[-1],), like=residual)
    if weight.shape[-1] > (most := most_normed_inputs(residual)):
        raise ValueError(f"{weight.shape[-1]} inputs with a norm: at most {most}")
    shape = residual.shape[0], weight.shape[0]
    out = torch.empty(shape, dtype=factor.rows_dtype, device=residual.device)
    _linear(residual, norm, factor, gate, activation, (out, False), following)
    return out


def specialisations() -> Iterator[Kernel]:
    """Yield every instance that the engine uses."""
    for storage, weights in (*zip(STORAGE, STORAGE, strict=True), (ROUNDED, FP8)):
        for norm in ("PLAIN", "RMS", "LAYER"):
            for gated in (False, True):
                yield Kernel.of("linear", "linear", storage, weights, norm, gated)


def _linear(
    x: Tensor,
    norm: Norm | None,
    factor: Factor,
    gate: Factor | None,
    activation: str | None,
    target: Target,
    following: Next,
) -> None:
    """Check, choose the instance and start it."""
    weight, (out, adds) = factor.weight, target
    gate = None if gate is None else Factor(*gate)
    _check(x, factor, gate, activation, following)
    rows, (channels, inputs) = x.shape[0], weight.shape
    kind = "PLAIN" if norm is None else "RMS" if norm.bias is None else "LAYER"
    tiles = ceil_div(channels, TILE if gate is None else TILE // 2)
    shared_bytes = rows * _staged_bytes(factor, norm)
    is_wide = out.dtype == torch.float32
    launch(
        Kernel.of("linear", "linear", factor.rows_dtype, weight.dtype, kind, gate is not None),
        (min(tiles, _resident_blocks(x, shared_bytes)) if rows else 0,),
        (THREADS,),
        *_row_arguments(x, norm),
        *factor,
        *(gate or (None, None, None)),
        np.int32(0 if activation is None else 1 + list(KINDS).index(activation)),
        None if is_wide else out,
        out if is_wide else None,
        np.int32(adds),
        np.int32(rows),
        np.int32(inputs),
        np.int32(channels),
        *_next_arguments(following, BLOCKS_PER_MULTIPROCESSOR * multiprocessors(x) * TILE),
        shared_bytes=shared_bytes,
    )


def _staged_bytes(factor: Factor, norm: Norm | None) -> int:
    """Return the bytes of shared memory that a row takes."""
    inputs = factor.weight.shape[1]
    if norm is not None:  # in the rows' dtype before it is rounded to FP8
        return inputs * factor.rows_dtype.itemsize + PAD_BYTES
    return 0 if factor.scales is None else inputs + PAD_BYTES


def _resident_blocks(x: Tensor, shared_bytes: int) -> int:
    """Return how many blocks the device runs at once.

    A later block would normalise its rows again, with nothing else running on its multiprocessor.
    """
    of_block = shared_bytes + SUMS_BYTES + RESERVED_BYTES
    fit = (block_shared_bytes(x) + RESERVED_BYTES) // of_block
    return min(BLOCKS_PER_MULTIPROCESSOR, fit) * multiprocessors(x)


def _row_arguments(x: Tensor, norm: Norm | None) -> tuple[Argument, ...]:
    """Return x and its stride, the stream, and the norm's weight, bias and epsilon."""
    if norm is None:
        return x, np.int64(x.stride(0)), None, None, None, np.float32(0)
    return None, np.int64(0), x, norm.weight, norm.bias, np.float32(norm.epsilon)


def _next_arguments(following: Next, channels: int) -> tuple[Argument, ...]:
    """Return two weights, how many of their channels to prefetch, and the bytes of a channel.

    channels: of all blocks that run at a time.
    """
    if not following or not current().prefetch:
        return None, None, np.int32(0), np.int32(0)
    weight, other = following[0], following[1] if len(following) > 1 else None
    share = min(weight.shape[0], channels // len(following))
    return weight, other, np.int32(share), np.int32(weight.shape[1] * weight.element_size())


def _check(
    x: Tensor,
    factor: Factor,
    gate: Factor | None,
    activation: str | None,
    following: Next,
) -> None:
    """See check."""
    weight = factor.weight
    check("weight", weight, STORAGE if factor.scales is None else FP8, (None, None), like=x)
    if x.shape[0] > MAX_ROWS:
        raise ValueError(f"{x.shape[0]} rows: at most {MAX_ROWS}")
    if not serves_rows(x, weight):
        raise ValueError(
            f"{weight.shape[1]} inputs: their number must be a multiple of 8, in FP8 of 16 and "
            "within shared memory, and every row must begin at a multiple of 16 bytes"
        )
    if activation is not None and activation not in KINDS:
        raise ValueError(f"unknown activation {activation!r}: one of {', '.join(KINDS)}")
    _check_channels("", factor, factor, x)
    if gate is not None:
        check("gate", gate.weight, weight.dtype, weight.shape, like=x)
        if gate.weight.data_ptr() % 16:
            raise ValueError("gate must begin at a multiple of 16 bytes")
        _check_channels(" of the gate", gate, factor, x)
    for one in following:
        check("following", one, following[0].dtype, following[0].shape, like=x)
        if not serves_weight(one):
            raise ValueError("following: every row must begin at a multiple of 16 bytes")


def _check_channels(whose: str, own: Factor, factor: Factor, x: Tensor) -> None:
    """Check what a factor has one of for each channel; see check."""
    shape = (factor.weight.shape[0],)
    if own.bias is not None:
        check(f"bias{whose}", own.bias, factor.rows_dtype, shape, like=x)
    if (own.scales is None) != (factor.scales is None):
        raise ValueError(f"scales{whose}: both weights must be in FP8, or none")
    if own.scales is not None:
        check(f"scales{whose}", own.scales, torch.float32, shape, like=x)
