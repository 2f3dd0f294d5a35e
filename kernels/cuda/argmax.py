"""The best token of each row: see argmax.cu.

Bytes: 4 B V, read once.  3 operations a score.  One block a row.  A small batch takes the time in
which one multiprocessor reads 200 KB, for a vocabulary of 50,000.  A large batch is bound by
bandwidth.  A thread loads 16 scores before it compares any, so a block has 32 KB in flight.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import check
from nightjar.kernels.cuda.kernel import Kernel
from nightjar.kernels.cuda.launch import launch
from nightjar.kernels.reference.sampling import finite_rows

THREADS = 512

_KERNEL = Kernel("argmax", "argmax")


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As reference.sampling.argmax."""
    return best_tokens(logits), finite_rows(logits)


def best_tokens(logits: Tensor, finite: Tensor | None = None) -> Tensor:
    """The best token of each row, ties to the lowest id: float32[B, V] -> int64[B].

    NaN counts as best, as in torch.  finite: bool[B], filled if given, whether the best score is
    finite.
    """
    check("logits", logits, torch.float32, (None, None))
    batch, vocab_size = logits.shape
    if vocab_size == 0:
        raise ValueError("logits of no vocabulary have no best token")
    if finite is not None:
        check("finite", finite, torch.bool, (batch,), like=logits)
        finite = finite.view(torch.uint8)
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    launch(_KERNEL, (batch,), (THREADS,), logits, tokens, finite, np.int32(vocab_size))
    return tokens


def specialisations() -> Iterator[Kernel]:
    """Yield every instance that the engine uses."""
    yield _KERNEL
