"""Bias, activation and gate of the feed-forward block: see activation.cu.

Bytes of N elements of s bytes: 2 N s, 3 N s with a gate.  10 to 30 operations an element: bound by
memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import ceil_div, check, check_storage, wide_elements
from nightjar.kernels.cuda.kernel import STORAGE, Kernel
from nightjar.kernels.cuda.launch import launch

THREADS = 128
"""Threads of a block: 1024 half columns, so that a row of 8192 is 8 blocks even in decode."""

KINDS = {"gelu_tanh": "GeluTanh", "gelu": "Gelu", "relu": "Relu", "silu": "Silu"}
"""The activations, and their structures in activation.cu."""


def activation(
    x: Tensor, kind: str, bias: Tensor | None = None, up: Tensor | None = None
) -> Tensor:
    """kind(x + bias) * up -> [T, I] in x's dtype, computed in FP32.

    x, up: [T, I], rows at any stride (halves of one projection); bias: [I].  Without bias and up
    as reference.activation.activation.

    Raises:
        ValueError: an unknown kind, or a tensor that does not fit.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown activation {kind!r}: one of {', '.join(KINDS)}")
    check_storage("x", x)
    check("x", x, x.dtype, (None, None), strided=True)
    rows, columns = x.shape
    if bias is not None:
        check("bias", bias, x.dtype, (columns,), like=x)
    if up is not None:
        check("up", up, x.dtype, (rows, columns), like=x, strided=True)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    width = wide_elements(columns, x, bias, up, out)
    launch(
        Kernel.of("activation", "activation", x.dtype, KINDS[kind], width),
        (rows, ceil_div(columns, THREADS * width)),
        (THREADS,),
        x,
        bias,
        up,
        out,
        np.int32(columns),
        np.int64(x.stride(0)),
        np.int64(0 if up is None else up.stride(0)),
    )
    return out


def specialisations() -> Iterator[Kernel]:
    """Yield every instance that the engine uses."""
    for storage in STORAGE:
        for kind in KINDS.values():
            for width in (16 // storage.itemsize, 1):
                yield Kernel.of("activation", "activation", storage, kind, width)
