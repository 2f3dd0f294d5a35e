"""Choosing the next token: argmax, or a draw from the filtered softmax."""

import torch
from torch import Tensor

CANDIDATES = 1024
"""Largest scores looked at first for top-p; a row whose mass lies wider is sorted whole."""


def argmax(logits: Tensor) -> Tensor:
    """The best token of each row, ties to the lowest id: float32[B, V] -> int64[B]."""
    return logits.argmax(-1)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, draws: Tensor
) -> Tensor:
    """Draw one token a row.

    logits: float32[B, V]; temperature: float32[B], > 0; top_k: int64[B], 0 = off; top_p:
    float32[B], 1 = off; draws: float64[B] in [0, 1).  Returns int64[B].
    The temperature comes first, then top-k, then top-p over what top-k left.  Both are thresholds
    on the score, so equal scores stay or go together and no sort order can matter.  The draw
    walks the distribution in vocabulary order.
    """
    scores = logits / temperature.unsqueeze(1)
    filtered = ((top_k > 0) | (top_p < 1.0)).nonzero().squeeze(1)
    if filtered.numel():
        limits = _thresholds(scores[filtered], top_k[filtered], top_p[filtered])
        kept = scores[filtered]
        scores[filtered] = kept.masked_fill_(kept < limits.unsqueeze(1), float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    sums = weights.cumsum(-1, dtype=torch.float64)
    places = torch.searchsorted(sums, (draws * sums[:, -1]).unsqueeze(1), right=True).squeeze(1)
    # A draw next to 1 can round up to the whole sum: take the last token that has any weight.
    last = (sums < sums[:, -1:]).sum(-1)
    return torch.minimum(places, last)


def _thresholds(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The lowest score each row may keep: float32[B, V] -> float32[B]."""
    vocab_size = scores.shape[1]
    count = min(vocab_size, max(CANDIDATES, int(top_k.max())))
    limits = torch.empty(scores.shape[0])
    wide = _top_limits(scores, top_k, top_p, count, limits)
    if wide.numel():
        whole = torch.empty(wide.numel())
        _top_limits(scores[wide], top_k[wide], top_p[wide], vocab_size, whole)
        limits[wide] = whole
    return limits


def _top_limits(scores: Tensor, top_k: Tensor, top_p: Tensor, count: int, limits: Tensor) -> Tensor:
    """Fill `limits` from the `count` best scores; returns the rows that need more of them."""
    vocab_size = scores.shape[1]
    best = scores.topk(count, dim=1).values
    by_k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    last = torch.minimum(by_k, torch.tensor(count)) - 1
    limit_k = best.gather(1, last.unsqueeze(1)).squeeze(1)
    # The mass that top-p shares out is that of what top-k left; a row without top-k needs all.
    weights = (best - best[:, :1]).exp().double()
    weights.masked_fill_(best < limit_k.unsqueeze(1), 0.0)
    whole = (scores - best[:, :1]).exp().double()
    whole.masked_fill_((scores < limit_k.unsqueeze(1)) & (top_k > 0).unsqueeze(1), 0.0)
    mass = whole.sum(-1) * top_p.double()
    sums = weights.cumsum(-1)
    reached = (sums < mass.unsqueeze(1)).sum(-1)
    limit_p = best.gather(1, reached.clamp(max=count - 1).unsqueeze(1)).squeeze(1)
    off = top_p >= 1.0
    no_limit = torch.full_like(limit_k, float("-inf"))
    limits.copy_(
        torch.maximum(
            torch.where(top_k > 0, limit_k, no_limit), torch.where(off, no_limit, limit_p)
        )
    )
    return ((reached >= count) & ~off & (count < vocab_size)).nonzero().squeeze(1)
