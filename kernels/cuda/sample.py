"""Drawing tokens from the filtered softmax without sorting: see sample.cu.

A row of V scores is read once to find the best (4 V bytes from memory), then again from the cache
of the multiprocessor or the GPU.  Top-k or top-p lists the best several hundred tokens in shared
memory in one pass.  Another pass sums the weights for top-p.  The draw takes little more than one.
The thresholds are found on the list.  Where the list is too short, each takes up to 8 passes over
the row; once at most 2,048 tokens are left, they are listed too.
About 30 operations a score and pass.  One block a row: its time is that of the passes, not of
memory, and rows do not wait for each other up to one a multiprocessor.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import check
from nightjar.kernels.cuda.kernel import Kernel
from nightjar.kernels.cuda.launch import launch

THREADS = 512

MAX_VOCAB = 1 << 18
"""The most tokens whose weights of 44 bits add up in 64 bits."""

_KERNEL = Kernel("sample", "sample")


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    draws: Tensor,
) -> Tensor:
    """As reference.sampling.sample: float32[B, V] and the rows' parameters -> int64[B].

    Also takes a temperature of 0 (the best token), and gives -1 for a row whose best score is not
    finite.  So a batch needs no sorting into kinds of rows, and the host need not check it.
    Weights are counted in units of 2^-44 of the best token's weight, so their sums are exact.  The
    error of a token's chance is less than 2^-44 of the best token's chance.
    """
    check("logits", logits, torch.float32, (None, None))
    batch, vocab_size = logits.shape
    if not 0 < vocab_size <= MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab_size}: tokens are drawn from 1 to {MAX_VOCAB}")
    wanted = {
        "temperature": (temperature, torch.float32),
        "top_k": (top_k, torch.int64),
        "top_p": (top_p, torch.float32),
        "min_p": (min_p, torch.float32),
        "draws": (draws, torch.float64),
    }
    for name, (tensor, dtype) in wanted.items():
        check(name, tensor, dtype, (batch,), like=logits)
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    launch(
        _KERNEL,
        (batch,),
        (THREADS,),
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        draws,
        tokens,
        np.int32(vocab_size),
    )
    return tokens


def specialisations() -> Iterator[Kernel]:
    """Yield every instance that the engine uses."""
    yield _KERNEL
