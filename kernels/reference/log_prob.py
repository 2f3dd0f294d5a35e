"""Negative log-likelihoods out of scores."""

import torch
from torch import Tensor

from nightjar.kernels.reference.widened import widened


def target_nll(logits: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits[rows[i]])[targets[i]]: [N, V], int64[M], int64[M] -> float[M].

    rows: ascending.
    """
    return -torch.log_softmax(widened(logits), -1)[rows, targets]
