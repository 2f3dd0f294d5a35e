"""FP8 (e4m3) by its definition: rows of a cache, with powers of two as scales, and of products."""

import math

import numpy as np
import torch

from nightjar.kernels import CacheScales, kv_write

LARGEST = 448.0


def _number(code):
    """The e4m3 number of a byte: a sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    whole = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -whole if sign else whole


NUMBERS = np.array([_number(code) for code in range(256)])


def quantised(row):
    """Codes and exponent of one row of float64 numbers."""
    if not np.isfinite(row).all():
        return np.zeros(row.shape, dtype=int), 255
    largest = np.abs(row).max()
    exponent = 1  # the least: 2 ** -126
    while largest / 2.0 ** (exponent - 127) > LARGEST:
        exponent += 1
    return np.array([_nearest(x / 2.0 ** (exponent - 127)) for x in row]), exponent


def _nearest(x):
    """The code of the nearest number; of two, the one whose code is even."""
    sign = 0x80 if math.copysign(1, x) < 0 else 0
    distances = np.abs(NUMBERS[:0x7F] - abs(x))
    nearest = np.flatnonzero(distances == distances.min())
    return sign | int(nearest[0] if len(nearest) == 1 else nearest[nearest % 2 == 0][0])


def numbers(codes, exponents):
    """Codes [..., D] and exponents [...] as float64."""
    exponents = np.asarray(exponents).astype(int)
    factors = np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents - 127) * (exponents > 0))
    return torch.from_numpy(NUMBERS[np.asarray(codes)] * factors[..., None])


def fp8_cache(k, v, lengths, tables, block_size, blocks):
    """A cache in FP8 with these packed rows: keys, values and scales; zeros elsewhere."""
    shape = (blocks, k.shape[1], block_size, k.shape[2])
    keys, values = (torch.zeros(shape, dtype=torch.uint8) for _ in range(2))
    scales = CacheScales(*(torch.zeros(shape[:-1], dtype=torch.uint8) for _ in range(2)))
    row_blocks, offsets = [], []
    for table, length in zip(tables, lengths, strict=True):
        row_blocks += [table[p // block_size] for p in range(length)]
        offsets += [p % block_size for p in range(length)]
    places = torch.tensor(row_blocks), torch.tensor(offsets)
    kv_write(keys, values, k, v, *places, scales)
    return keys, values, scales


def kept(x):
    """What a cache in FP8 keeps of rows [T, H, D], in float64; by the definition."""
    rows = x.double().reshape(-1, x.shape[-1]).numpy()
    found = [numbers(*quantised(row)) for row in rows]
    return torch.stack(found).view(x.shape)


def product_row(row):
    """Codes and scale of one row of a product, float32 numbers: its largest / 448."""
    row = np.asarray(row, dtype=np.float32)
    largest = np.abs(row).max()
    if not np.isfinite(row).all():
        return np.zeros(row.shape, dtype=int), np.float32(math.nan)
    largest = max(largest, np.float32(1e-30))
    inverse = np.float32(LARGEST) / largest
    codes = np.array([_nearest(float(x * inverse)) for x in row])
    return codes, largest / np.float32(LARGEST)


def product_numbers(x):
    """What FP8 leaves of the rows [T, K] of a product, in float64; by the definition."""
    found = [product_row(row.float().numpy()) for row in x]
    kept = [NUMBERS[codes] * float(scale) for codes, scale in found]
    return torch.from_numpy(np.array(kept)).view(x.shape)
