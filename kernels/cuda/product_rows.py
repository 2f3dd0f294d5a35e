"""Rows of a product rounded to FP8: see product_rows.cu.

Bytes of M rows of K inputs: 2 M K are read from memory and once more from cache, M K written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import check, wide_elements
from nightjar.kernels.cuda.kernel import FP8, Kernel
from nightjar.kernels.cuda.launch import launch

ROUNDED = torch.bfloat16
"""The dtype of rows before they are rounded to FP8."""

THREADS = 256
WIDTHS = (8, 1)
"""Numbers of one load: 16 bytes, or one where rows do not begin at a multiple of that."""


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """codes: uint8[M, K]; scales: float32[M], what a row's codes are multiplied with."""

    codes: Tensor
    scales: Tensor


def round_rows(x: Tensor, padded: int) -> Fp8Rows:
    """As reference.fp8_linear.quantised of x bfloat16[M, K], its rows at any stride.

    padded: the inputs of the codes, at least K; codes past K are 0.

    Raises:
        ValueError: A tensor that does not fit.
    """
    check("x", x, ROUNDED, (None, None), strided=True)
    rows, inputs = x.shape
    if padded < inputs:
        raise ValueError(f"{inputs} inputs are more than the {padded} of the codes")
    codes = torch.empty(rows, padded, dtype=FP8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    width = WIDTHS[0] if wide_elements(inputs, x) == WIDTHS[0] and padded % WIDTHS[0] == 0 else 1
    launch(
        Kernel.of("product_rows", "round_rows", width),
        (rows,),
        (THREADS,),
        x,
        np.int64(x.stride(0)),
        codes,
        scales,
        np.int32(inputs),
        np.int32(padded),
    )
    return Fp8Rows(codes, scales)


def specialisations() -> Iterator[Kernel]:
    """Yield every instance that the engine uses."""
    for width in WIDTHS:
        yield Kernel.of("product_rows", "round_rows", width)
