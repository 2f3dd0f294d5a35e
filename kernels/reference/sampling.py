"""Chooses the next token: argmax, or a draw from the filtered softmax.

On a CPU, NumPy sorts rows and finds their maximum several times faster than torch (SIMD).
"""

import numpy as np
import torch
from torch import Tensor


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best token of each row and whether the row is finite.

    float32[B, V] -> int64[B], bool[B].  Of equal scores the lowest id is best.  In a row with a NaN
    or an infinity the token is undefined.
    """
    return torch.from_numpy(logits.numpy().argmax(-1)), finite_rows(logits)


def finite_rows(logits: Tensor) -> Tensor:
    """Whether a row holds neither NaN nor infinity: float32[B, V] -> bool[B]."""
    # Both pass a NaN on, and an infinity is one of them.
    return logits.amin(-1).isfinite() & logits.amax(-1).isfinite()


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    draws: Tensor,
) -> Tensor:
    """Draw one token a row.

    logits: float32[B, V]; temperature: float32[B], > 0; top_k: int64[B], 0 = off; top_p:
    float32[B], 1 = off; min_p: float32[B], 0 = off; draws: float64[B] in [0, 1).  Returns int64[B].
    The temperature comes first, then top-k, then top-p over the rest, then min-p, as in
    transformers.  All three are thresholds on the score.  So equal scores are kept or removed
    together, and the sort order does not matter.  The draw walks the distribution in vocabulary
    order.
    """
    # Relative to the best score, a temperature near 0 leaves the best token and gives no NaN.
    scores = logits - logits.amax(-1, keepdim=True)
    scores /= temperature.clamp(min=1e-30).unsqueeze(1)
    by_k, by_p, by_min = (x.nonzero().squeeze(1) for x in (top_k > 0, top_p < 1.0, min_p > 0.0))
    if by_k.numel():
        scores[by_k] = _keep_top_k(scores[by_k], top_k[by_k])
    # Row by row, not elementwise: no element's bits depend on the size of the batch.
    weights = scores.softmax(-1)
    if by_p.numel():
        weights[by_p] = _keep_top_p(weights[by_p], top_p[by_p])
    if by_min.numel():
        weights[by_min] = _keep_min_p(weights[by_min], min_p[by_min])
    sums = weights.cumsum(-1, dtype=torch.float64)
    indices = torch.searchsorted(sums, (draws * sums[:, -1]).unsqueeze(1), right=True).squeeze(1)
    # A draw near 1 can round up to the whole sum: take the last token with a weight.
    last = torch.searchsorted(sums, sums[:, -1:].contiguous()).squeeze(1)
    return torch.minimum(indices, last)


def _keep_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    """Set scores to -inf where a row has top_k better ones: float32[B, V], int64[B]."""
    rising = torch.from_numpy(np.sort(scores.numpy(), axis=1))
    indices = scores.shape[1] - top_k.clamp(max=scores.shape[1])
    return scores.masked_fill(scores < rising.gather(1, indices.unsqueeze(1)), float("-inf"))


def _keep_top_p(weights: Tensor, top_p: Tensor) -> Tensor:
    """Set weights to 0 outside the fewest tokens that hold top_p: float32[B, V], float32[B]."""
    falling = torch.from_numpy(-np.sort(-weights.numpy(), axis=1))
    sums = falling.cumsum(-1, dtype=torch.float64)
    last = torch.searchsorted(sums, top_p.double().unsqueeze(1)).clamp(max=weights.shape[1] - 1)
    return weights.masked_fill(weights < falling.gather(1, last), 0.0)


def _keep_min_p(weights: Tensor, min_p: Tensor) -> Tensor:
    """Set weights to 0 below min_p times the row's best (arXiv 2407.01082)."""
    limits = weights.amax(-1, keepdim=True) * min_p.unsqueeze(1)
    return weights.masked_fill(weights < limits, 0.0)
