"""Negative log-likelihoods of given tokens from logits: see token_nll.cu.

Bytes: s V for each row that something is predicted from, read once; 16 for each token.  An
exponential and 3 operations a score: bound by memory.  A thread issues 4 loads of 16 bytes (8 of
one score where rows are not aligned) before it adds any up.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import check, check_storage, wide_elements
from nightjar.kernels.cuda.kernel import STORAGE, Kernel
from nightjar.kernels.cuda.launch import launch

THREADS = 256
"""Threads of a block, which takes one row: a chunk of logits has hundreds of rows."""


def token_nll(logits: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits[rows[i]])[targets[i]] -> float32[M].

    logits: [N, V], rows at any stride; rows: int64[M], ascending; targets: int64[M]; one outside
    the vocabulary gives NaN.  The head's product in front of it is torch's, in chunks of rows.
    """
    check_storage("logits", logits)
    check("logits", logits, logits.dtype, (None, None), strided=True)
    check("rows", rows, torch.int64, (None,), like=logits)
    check("targets", targets, torch.int64, rows.shape, like=logits)
    count, vocab_size = logits.shape
    # Where each row's targets begin: found on the device, so that the host need not wait.
    edges = torch.arange(count + 1, dtype=torch.int64, device=logits.device)
    starts = torch.searchsorted(rows, edges)
    nll = torch.empty(rows.shape[0], dtype=torch.float32, device=logits.device)
    width = wide_elements(vocab_size, logits)
    launch(
        Kernel.of("token_nll", "token_nll", logits.dtype, width),
        (count,),
        (THREADS,),
        logits,
        np.int64(logits.stride(0)),
        starts,
        targets,
        nll,
        np.int32(vocab_size),
    )
    return nll


def specialisations() -> Iterator[Kernel]:
    """Yield every instance that the engine uses."""
    for storage in STORAGE:
        for width in (16 // storage.itemsize, 1):
            yield Kernel.of("token_nll", "token_nll", storage, width)
