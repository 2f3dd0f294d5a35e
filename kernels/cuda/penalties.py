"""Repetition, presence and frequency penalties: see penalties.cu.

Bytes of a row with n seen tokens: V / 8 of bitmap, and 12 n (count read, score read and written);
rows without penalties read 12 bytes.  5 operations a seen token: bound by the launch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import ceil_div, check
from nightjar.kernels.cuda.kernel import Kernel
from nightjar.kernels.cuda.launch import launch

THREADS = 128
"""Threads of a block, a word of the bitmap each: 4096 tokens."""

WORD_BITS = 32

_KERNEL = Kernel("penalties", "penalize")


def penalize(
    logits: Tensor,
    seen: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Make seen tokens less likely, each once, in place: see reference.logits.penalize_tokens.

    logits: float32[B, V]; seen: int32[B, ceil(V / 32)], bit t % 32 of word t / 32 for token t;
    counts: int32[B, V], how often it was generated; repetition, presence, frequency: float32[B];
    1, 0, 0 are off.
    """
    check("logits", logits, torch.float32, (None, None))
    batch, vocab_size = logits.shape
    words = ceil_div(vocab_size, WORD_BITS)
    check("seen", seen, torch.int32, (batch, words), like=logits)
    check("counts", counts, torch.int32, (batch, vocab_size), like=logits)
    penalties = {"repetition": repetition, "presence": presence, "frequency": frequency}
    for name, penalty in penalties.items():
        check(name, penalty, torch.float32, (batch,), like=logits)
    launch(
        _KERNEL,
        (batch, ceil_div(words, THREADS)),
        (THREADS,),
        logits,
        seen,
        counts,
        repetition,
        presence,
        frequency,
        np.int32(vocab_size),
        np.int32(words),
    )


def specialisations() -> Iterator[Kernel]:
    """Yield every instance that the engine uses."""
    yield _KERNEL
