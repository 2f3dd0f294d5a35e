"""A decoder that several ranks compute in lockstep, each its part."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nightjar import kernels
from nightjar.checkpoints.adapters import not_computed
from nightjar.gpu_worker.models.batch import TokenBatch
from nightjar.gpu_worker.models.decoder import Decoder
from nightjar.gpu_worker.models.split import Part, width


class Collective(Protocol):
    """Exchanges tensors between ranks; all ranks make the same calls in the same order."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x [T, H], with the same bits on each; x may be overwritten.

        On the CPU no row's bits depend on the other rows.
        """

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return all ranks' x, of one shape, in the order of ranks; empty except on rank 0."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's x; on other ranks x gives shape and dtype, and is overwritten."""


class ShardDecoder(Decoder):
    """One rank's part of a decoder.

    `forward` gives every rank the same hidden states, those of the whole model; `logits` and
    `token_nll` give rank 0 the whole model's, and the others nothing to be used.
    """

    in_lockstep = True
    is_whole = False
    no_adapters = not_computed(None, "", ranks=2)

    def __init__(self, own: Decoder, part: Part, collective: Collective) -> None:
        """own: a decoder with the part's weights, as `load_model` makes it."""
        super().__init__(own.config, own.weights, own.dtype, own.cache_dtype, own.device)
        self.part = part
        self.collective = collective

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute scores over the vocabulary: [N, H] -> float32[N, V]; other ranks: [N, 0]."""
        scores = super().logits(hidden)
        counts = self.part.token_counts(self.config.vocab_size)
        gathered = self.collective.gather(F.pad(scores, (0, max(counts) - scores.shape[1])))
        if not gathered:
            return scores[:, :0]
        return torch.cat([x[:, :n] for x, n in zip(gathered, counts, strict=True)], 1)

    def token_nll(self, hidden: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        """Compute Decoder.token_nll; the result on other ranks than 0 has no meaning.

        Each rank sends the log-sum-exp of its own scores, and the target's score if it holds it.
        The log-sum-exp over the vocabulary is that over the ranks' log-sum-exps.
        """
        start, stop = self.part.tokens.start, self.part.tokens.stop
        own = (targets >= start) & (targets < stop)
        parts = kernels.token_log_sums(
            hidden, self.weights.head, rows, torch.where(own, targets - start, 0)
        )
        parts[1].masked_fill_(~own, 0.0)
        gathered = self.collective.gather(parts)
        if not gathered:
            return parts[0]
        sums, scores = torch.stack(gathered).double().cpu().unbind(1)
        # NumPy's logaddexp is a scalar loop: no pair's bits depend on the others.
        total = np.logaddexp.reduce(sums.numpy(), axis=0)
        nll = torch.from_numpy(total) - scores.sum(0)
        return nll.float().to(hidden.device)

    def _embed(self, batch: TokenBatch) -> Tensor:
        """Return every row from the rank that holds it; others give zeros, so the sum is exact."""
        return self.collective.sum(
            super()._embed(replace(batch, token_ids=self._own_ids(batch.token_ids)))
        )

    def _own_ids(self, ids: Tensor) -> Tensor:
        """Return ids as this rank's table counts them.

        Tokens of other ranks read the row of zeros at the end.  Ids past the vocabulary, prompt
        vectors, belong to the first rank.
        """
        rows = width(self.part.tokens)
        local = ids - self.part.tokens.start
        own = torch.where((local >= 0) & (local < rows), local, rows)
        if not self.part.is_first:
            return own
        vocab_size = self.config.vocab_size
        return torch.where(ids >= vocab_size, ids - vocab_size + rows + 1, own)

    def _joined(self, part: Tensor) -> Tensor:
        return self.collective.sum(part)
