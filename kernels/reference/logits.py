"""Changes to the scores before a token is chosen, and the best log-probabilities of a row.

A change touches only the scores (rows[i], ids[i]), of all rows in one call, in place.  No pair may
be given twice.  rows, ids: int64[M]; logits: float32[B, V].  Changes are single additions,
multiplications and divisions, so no bit depends on the other rows.
"""

import torch
from torch import Tensor


def block_tokens(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Set the tokens' scores to -inf."""
    logits.index_put_((rows, ids), logits.new_tensor(float("-inf")))


def bias_tokens(logits: Tensor, rows: Tensor, ids: Tensor, bias: Tensor) -> None:
    """Add bias: float32[M] (OpenAI's logit_bias)."""
    logits.index_put_((rows, ids), logits[rows, ids] + bias)


def penalize_tokens(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Make seen tokens less likely.

    counts: float32[M], how often the token was generated, 0 for one that only the prompt holds;
    repetition, presence, frequency: float32[M], the penalties of each score's row; 1, 0, 0 are off.
    A score above 0 is divided by the repetition penalty, any other multiplied by it (CTRL, Keskar
    et al. 2019, as transformers has it); then frequency * counts is taken off, and presence where
    counts > 0 (OpenAI's formula).
    """
    scores = logits[rows, ids]
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores -= frequency * counts
    scores -= presence * (counts > 0)
    logits.index_put_((rows, ids), scores)


def top_log_probs(log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the best of each row, equal ones by id: float32[B, V] -> float32[B, n], int64[B, n].

    n is min(count, V).  The first k of n are the same whatever n is.
    """
    count = min(count, log_probs.shape[1])
    best = log_probs.topk(count, dim=1)
    ids, order = best.indices.sort(dim=1)
    values, rank = best.values.gather(1, order).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, rank)
    # Of equal scores at the end topk takes any: take those of the lowest ids.
    last = values[:, -1:]
    crowded = (log_probs >= last).sum(1) > count
    for row in crowded.nonzero().squeeze(1).tolist():
        equals = (log_probs[row] == last[row]).nonzero().squeeze(1)
        room = int((values[row] == last[row]).sum())
        ids[row, count - room :] = equals[:room]
    return values, ids
