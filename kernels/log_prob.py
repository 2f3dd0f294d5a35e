"""Negative log-likelihood of given tokens, never with the logits of all rows at once."""

import torch
from torch import Tensor

from nightjar.kernels import cuda_ops, native, reference
from nightjar.kernels.cuda.launch import serves
from nightjar.kernels.linear import LinearWeight, linear

CHUNK_BYTES = 8 << 20
"""Logits held at once: small enough for the cache, large enough for the product to be fast."""


def token_nll(hidden: Tensor, head: LinearWeight, rows: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(hidden[rows[i]] @ head)[targets[i]] for every pair i.

    hidden: [N, H]; rows: int64[M], ascending, so that a row that many targets follow (the end of
    a query) meets the vocabulary once; targets: int64[M], below the vocabulary.
    Returns float32[M].
    """
    nll = torch.empty(rows.shape[0], dtype=torch.float32, device=hidden.device)
    step = max(64, CHUNK_BYTES // (4 * head.out_features))
    begin = 0
    for start in range(0, hidden.shape[0], step):
        end = int(torch.searchsorted(rows, start + step))
        if end > begin:
            logits = linear(hidden[start : start + step], head)
            nll[begin:end] = _target_nll(logits, rows[begin:end] - start, targets[begin:end])
        begin = end
    return nll


def _target_nll(logits: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """Of one chunk of scores [N, V], by whichever backend serves it: float[M]."""
    if serves(logits):
        return cuda_ops.token_nll(logits, rows, targets)
    if native.log_prob.serves(logits):
        return native.log_prob.target_nll(logits, rows, targets)
    return reference.log_prob.target_nll(logits, rows, targets)
