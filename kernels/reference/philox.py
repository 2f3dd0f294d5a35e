"""Counter-based random numbers: seed, stream and step decide the number."""

import numpy as np
import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def uniform(seeds: Tensor, streams: Tensor, steps: Tensor) -> Tensor:
    """Return a number in [0, 1) for each (seed, stream, step): float64[B].

    seeds: int64[B], the key; streams: int64[B], below 2**32, and steps: int64[B], the counter.
    Philox 4x32-10 keeps no state between calls.  So a request's numbers depend neither on its batch
    nor on a restart, and the streams of one seed (the samples of a request) are independent.  All
    backends give the same bits.
    """
    key = seeds.numpy().astype(np.uint64)
    stream = streams.numpy().astype(np.uint64)
    step = steps.numpy().astype(np.uint64)
    words = philox_4x32(step & _LOW, step >> _SHIFT, stream, key & _LOW, key >> _SHIFT)
    bits = (words[0] << _SHIFT | words[1]) >> np.uint64(11)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-53)


def philox_4x32(
    c0: np.ndarray, c1: np.ndarray, c2: np.ndarray, k0: np.ndarray, k1: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Run ten rounds over the counter (c0, c1, c2, 0) with the key (k0, k1): four 32-bit words.

    Every array is uint64[B] with 32 bits in use.
    """
    c3 = np.zeros_like(c0)
    for _ in range(_ROUNDS):
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (high >> _SHIFT) ^ c1 ^ k0,
            high & _LOW,
            (low >> _SHIFT) ^ c3 ^ k1,
            low & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3
