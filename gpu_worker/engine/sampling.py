"""The next token of every row of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nightjar import kernels
from nightjar.gpu_worker.engine.sequence import GenerateSequence

_MASK_64 = (1 << 64) - 1


def next_tokens(
    logits: Tensor, sequences: Sequence[GenerateSequence], banned: Tensor
) -> list[int | None]:
    """One token for each row; None where a row's scores are not finite.

    logits: float32[B, V], changed; banned: int64[n], ids that are never chosen.
    """
    if banned.numel():
        logits.index_fill_(1, banned, float("-inf"))
    # The maximum carries a NaN anywhere in the row, and is infinite where a score overflowed.
    finite = logits.amax(-1).isfinite()
    tokens = kernels.argmax(logits)
    drawn = [i for i, sequence in enumerate(sequences) if sequence.sampling.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn)
        usable = finite[rows].unsqueeze(1)
        scores = torch.where(usable, logits[rows], 0.0)
        tokens[rows] = _draw(scores, [sequences[i] for i in drawn])
    pairs = zip(tokens.tolist(), finite.tolist(), strict=True)
    return [token if fine else None for token, fine in pairs]


def _draw(logits: Tensor, sequences: Sequence[GenerateSequence]) -> Tensor:
    """Sampled rows: each draw depends on the request's seed and step alone."""
    params = [sequence.sampling for sequence in sequences]
    seeds = np.array([p.seed & _MASK_64 for p in params], dtype=np.uint64).view(np.int64)
    steps = torch.tensor([len(sequence.generated) for sequence in sequences])
    return kernels.sample(
        logits,
        torch.tensor([p.temperature for p in params], dtype=torch.float32),
        torch.tensor([min(p.top_k, logits.shape[1]) for p in params]),
        torch.tensor([p.top_p for p in params], dtype=torch.float32),
        kernels.uniform(torch.from_numpy(seeds), steps),
    )
