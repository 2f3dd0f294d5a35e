"""Rows of numbers in FP8 (e4m3), each with a power of two as its scale.

An e4m3 number has 4 bits of exponent and 3 of mantissa; the largest is 448.  A row's scale is the
least power of two that keeps the row within that.  It is a power of two because the numbers are
then multiplied back exactly, in FP16, bfloat16 and FP32 alike (in FP16 down to its least number).
So every kernel attends to the same numbers, whatever it multiplies in.  Nothing is lost by it: the
numbers' own exponents make up for a scale that is up to twice as large.  It takes one byte, as the
scales of microscaling formats do (E8M0): an exponent, where 255 is NaN.
"""

import torch
from torch import Tensor

LARGEST_EXPONENT = 8
"""448 is 1.75 * 2 ** 8."""

_ABOVE = (1 << 21) - 1  # carries into the exponent of FP32 where the mantissa is more than 1.75
_NOT_A_NUMBER = 255


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [..., D] to FP8; return codes uint8[..., D] and exponents uint8[...].

    A code is the byte of an e4m3 number; its factor is 2 ** (exponent - 127).  Then x differs from
    its code times the factor by at most 2 ** -4 |x| or 2 ** -10 of the factor.
    A row with a number that is not finite is NaN throughout, by its exponent: so it is noticed.
    """
    wide = x.float()
    peaks = wide.abs().amax(-1)
    finite = peaks.isfinite()
    bits = torch.where(finite, peaks, 0.0).view(torch.int32)
    exponents = (((bits + _ABOVE) >> 23) - LARGEST_EXPONENT).clamp_min(1)
    inverse = (254 - exponents << 23).view(torch.float32)
    codes = (wide * inverse.unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8)
    codes.masked_fill_(~finite.unsqueeze(-1), 0)
    return codes, torch.where(finite, exponents, _NOT_A_NUMBER).to(torch.uint8)


def dequantised(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of codes uint8[..., D] and exponents uint8[...]: dtype[..., D]."""
    factors = (exponents.int() << 23).view(torch.float32)  # 0 for an exponent of 0
    factors = factors.masked_fill(exponents == _NOT_A_NUMBER, torch.nan)
    return codes.view(torch.float8_e4m3fn).float().mul_(factors.unsqueeze(-1)).to(dtype)
