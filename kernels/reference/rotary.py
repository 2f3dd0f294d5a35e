"""Rotary embedding."""

from torch import Tensor

from nightjar.kernels.reference.widened import widened

PART_NUMBERS = 32_768
"""Products held at once: they stay in the processor's cache and need no new memory.

That makes a long prefill several times faster.
"""


def rotary(x: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Rotate the first channels of every head by its row's angles, in place (arXiv 2104.09864).

    x: [T, heads, D]; cosines, sines: float32[T, n], n <= D / 2.  Channel i rotates with channel
    i + n (the layout of GPT-NeoX and Llama checkpoints); channels from 2n on are kept.
    Products and sums only, in FP32: no element's bits depend on its position in memory.
    """
    rows = max(1, PART_NUMBERS // (x.shape[1] * cosines.shape[1]))
    if x.shape[0] <= rows:
        _rotate(x, cosines, sines)
        return
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        _rotate(x[part], cosines[part], sines[part])


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Rotate all rows at once."""
    n = cosines.shape[1]
    cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)
    rotated = widened(x[..., : 2 * n])  # x itself where it is wide enough
    first, second = rotated[..., :n], rotated[..., n:]
    across = first * sines
    first.mul_(cosines).sub_(second * sines)
    second.mul_(cosines).add_(across)
    if x.dtype != rotated.dtype:
        x[..., : 2 * n] = rotated
