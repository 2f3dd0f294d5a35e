"""Rows in FP16 whose numbers FP16 cannot hold: each row is scaled by a power of two."""

import torch
from torch import Tensor

LARGEST_EXPONENT = 15
"""Scaled rows stay below 2 ** 15; FP16 ends at 65,504."""


def scaled_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round float32[T, K] to float16[T, K]; return it with each row's factor, float32[T, 1].

    A row is scaled only if it needs to be, by an exact power of two.  So other rows are rounded as
    FP16 always is, and no row depends on another one.
    """
    peaks = x.abs().amax(-1, keepdim=True)
    exponents = (torch.frexp(peaks).exponent - LARGEST_EXPONENT).clamp_min(0)
    return torch.ldexp(x, -exponents).half(), torch.ldexp(torch.ones_like(peaks), exponents)
