"""Negative log-likelihoods from scores."""

import torch
from torch import Tensor

from nightjar.kernels.reference.widened import widened


def target_nll(logits: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits[rows[i]])[targets[i]]: [N, V], int64[M], int64[M] -> float[M].

    rows: ascending.  NaN where the row holds NaN or infinities.
    """
    scores = widened(logits)
    lowest = scores.amin(-1)  # the softmax itself would accept -inf
    return (lowest - lowest)[rows] - torch.log_softmax(scores, -1)[rows, targets]
