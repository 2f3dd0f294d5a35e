"""The loss of examples under prompt vectors, or without any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nightjar.gpu_worker.tuning.frozen_model import FrozenModel
from nightjar.gpu_worker.tuning.rows import VECTOR, Example
from nightjar.gpu_worker.tuning.rows import Sequence as Tokens

_SCORED_AT_ONCE = 4096  # rows of logits: 4096 * 50,000 * 4 bytes are 0.8 GB at most


@dataclass(frozen=True, slots=True)
class Measure:
    """Means over examples.

    loss: nats a token of targets; of rankings, the cross-entropy of the right document.
    accuracy: the share of rankings whose right document is best; None for targets.
    """

    loss: float
    accuracy: float | None


def batch_loss(
    model: FrozenModel, vectors: Tensor | None, examples: Sequence[Example]
) -> tuple[Tensor, int, int]:
    """Return the summed loss, what it is to be divided by, and how many rankings are right.

    vectors: float32[n, H]; None leaves the vectors' positions out.
    """
    sequences = [one for example in examples for one in example.sequences]
    sums = sequence_nll(model, vectors, sequences)
    if examples[0].best is None:
        return sums.sum(), sum(one.scored for one in sequences), 0
    counts = sums.new_tensor([one.scored for one in sequences])
    means = iter(torch.split(sums / counts, [len(one.sequences) for one in examples]))
    total, right = sums.new_zeros(()), 0
    for example, scores in zip(examples, means, strict=True):
        best = torch.tensor(example.best, device=sums.device)
        total = total + F.cross_entropy(-scores, best)
        right += int(scores.argmin()) == example.best
    return total, len(examples), right


def sequence_nll(model: FrozenModel, vectors: Tensor | None, sequences: Sequence[Tokens]) -> Tensor:
    """Return the summed negative log-likelihood of each sequence's learned tokens: [S]."""
    kept = [one if vectors is not None else _without_vectors(one) for one in sequences]
    length = max(len(one.ids) for one in kept)
    padded = [one.ids + [0] * (length - len(one.ids)) for one in kept]
    ids = torch.tensor(padded, device=model.device)
    rows = model.embed(ids.clamp(min=0))
    if vectors is not None:
        # The vectors of each sequence come in order.
        rows = rows.masked_scatter((ids == VECTOR)[..., None], vectors.repeat(len(kept), 1))
    hidden = model.hidden(rows)
    sources = [
        (i, t - 1) for i, one in enumerate(kept) for t in range(one.scored_from, len(one.ids))
    ]
    index = torch.tensor(sources, device=model.device)
    states = hidden[index[:, 0], index[:, 1]]
    targets = ids[index[:, 0], index[:, 1] + 1]
    parts = [
        F.cross_entropy(model.logits(some), wanted, reduction="none")
        for some, wanted in zip(
            torch.split(states, _SCORED_AT_ONCE), torch.split(targets, _SCORED_AT_ONCE), strict=True
        )
    ]
    nll = torch.cat(parts)
    return nll.new_zeros(len(kept)).index_add(0, index[:, 0], nll)


def measure(
    model: FrozenModel, vectors: Tensor | None, examples: Sequence[Example], batch: int
) -> Measure:
    """Return the means over the examples."""
    total, weight, right = 0.0, 0, 0
    with torch.inference_mode():
        for start in range(0, len(examples), batch):
            some = examples[start : start + batch]
            loss, counted, correct = batch_loss(model, vectors, some)
            total, weight, right = total + float(loss), weight + counted, right + correct
    accuracy = None if examples[0].best is None else right / len(examples)
    return Measure(total / weight, accuracy)


def _without_vectors(sequence: Tokens) -> Tokens:
    ids = [one for one in sequence.ids if one != VECTOR]
    return Tokens(ids, sequence.scored_from - (len(sequence.ids) - len(ids)))
