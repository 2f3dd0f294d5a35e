"""Negative log-likelihood of given tokens, with the logits of few rows at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from nightjar.kernels.linear import linear
from nightjar.kernels.operands import LinearWeight
from nightjar.kernels.ops import target_nll

CHUNK_BYTES = 8 << 20
"""Logits held at once: they fit into the cache, and the product is still fast."""

DEVICE_CHUNK_BYTES = 256 << 20
"""Logits held at once on a GPU, which needs many rows and reads the head for every chunk."""


def token_nll(hidden: Tensor, head: LinearWeight, rows: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(hidden[rows[i]] @ head)[targets[i]] for every pair i.

    hidden: [N, H]; rows: int64[M], ascending, so that a row that many targets follow (the end of
    a query) meets the vocabulary once; targets: int64[M], below the vocabulary.
    Returns float32[M]; NaN where a row's scores are not all finite.
    """
    nll = torch.empty(rows.shape[0], dtype=torch.float32, device=hidden.device)
    for logits, own, pairs in _chunks(hidden, head, rows):
        nll[pairs] = target_nll(logits, own, targets[pairs])
    return nll


def token_log_sums(hidden: Tensor, head: LinearWeight, rows: Tensor, targets: Tensor) -> Tensor:
    """Compute the parts of `token_nll` for a head that holds a part of the vocabulary.

    Arguments as token_nll's; targets count from the part's first token.
    Returns float32[2, M]: the log-sum-exp of the scores of hidden[rows[i]] in this part, and the
    score of targets[i].
    """
    found = torch.empty(2, rows.shape[0], dtype=torch.float32, device=hidden.device)
    for logits, own, pairs in _chunks(hidden, head, rows):
        found[1, pairs] = logits[own, targets[pairs]].float()
        found[0, pairs] = target_nll(logits, own, targets[pairs]).float() + found[1, pairs]
    return found


def _chunks(
    hidden: Tensor, head: LinearWeight, rows: Tensor
) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Yield logits of a few rows, the row of each of their pairs, and the slice of these pairs."""
    held = DEVICE_CHUNK_BYTES if hidden.is_cuda else CHUNK_BYTES
    step = max(64, held // (4 * head.out_features))
    starts = torch.arange(0, hidden.shape[0], step, device=rows.device)
    ends = torch.searchsorted(
        rows, starts + step
    ).tolist()  # all at once, because it waits for a device
    begin = 0
    for start, end in zip(range(0, hidden.shape[0], step), ends, strict=True):
        if end > begin:
            yield (
                linear(hidden[start : start + step], head),
                rows[begin:end] - start,
                slice(begin, end),
            )
        begin = end
