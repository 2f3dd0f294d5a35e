"""Rotary position embedding."""

from torch import Tensor


def rotary(x: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Turn the first channels of every head by its row's angles, in place (arXiv 2104.09864).

    x: [T, heads, D]; cosines, sines: float32[T, n], n <= D / 2.  Channel i turns with channel
    i + n (the layout of GPT-NeoX and Llama checkpoints); channels from 2n on are kept.
    Products and sums only, in FP32: no element's bits depend on where it lies.
    """
    n = cosines.shape[1]
    cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)
    first, second = x[..., :n], x[..., n : 2 * n]
    turned = first * cosines - second * sines
    second.copy_(second * cosines + first * sines)
    first.copy_(turned)
