"""A decoder that several ranks compute in lockstep, each its part."""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nightjar import kernels
from nightjar.checkpoints.adapters import not_computed
from nightjar.gpu_worker.models.decoder import Decoder
from nightjar.gpu_worker.models.graphs import NotRecordedError, Recorder, Step, eager
from nightjar.gpu_worker.models.split import Part

logger = logging.getLogger(__name__)


class Collective(Protocol):
    """Exchanges tensors between ranks; all ranks make the same calls in the same order.

    is_recordable: whether a CUDA graph can hold its exchanges.
    """

    is_recordable: bool

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x [T, H], with the same bits on each; x may be overwritten.

        On the CPU no row's bits depend on the other rows.
        """

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' x, of one shape, in the order of ranks: [ranks, *x.shape]."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's x; on other ranks x gives shape and dtype, and is overwritten."""


class AgreedRecorder:
    """Records a step on all ranks; where that fails on one of them, none plays it back.

    While a step is recorded, nothing is exchanged. So a rank whose recording fails is still in step
    with the others.  A step that fails before, where it exchanges, raises: the others wait for it.
    """

    def __init__(self, record: Recorder, part: Part, collective: Collective, device: str) -> None:
        self._record = record
        self._part = part
        self._collective = collective
        self._device = device

    def __call__(self, step: Step) -> Step:
        """Record the step, as Recorder says; return the step itself where a rank could not."""
        recorded = step
        try:
            recorded = self._record(step)
        except NotRecordedError:
            message = "rank %d cannot record a step; all ranks launch it kernel by kernel"
            logger.exception(message, self._part.rank, extra={"action": "step_not_recorded"})
        succeeded = torch.full((1, 1), float(recorded is not step), device=self._device)
        count = self._collective.sum(succeeded).item()
        return recorded if count == self._part.ranks else step


class ShardDecoder(Decoder):
    """One rank's part of a decoder.

    `forward` and `logits` give every rank what the whole model gives, with the same bits on each;
    `token_nll` gives it to rank 0, and the others nothing to be used.
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
        """Compute scores over the vocabulary: [N, H] -> float32[N, V].

        Each rank computes the scores of its tokens, and all ranks get the scores of all.
        """
        scores = super().logits(hidden)
        counts = self.part.token_counts(self.config.vocab_size)
        gathered = self.collective.gather(F.pad(scores, (0, max(counts) - scores.shape[1])))
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
        if not self.part.is_first:
            return parts[0]
        sums, scores = gathered.double().cpu().unbind(1)
        # NumPy's logaddexp is a scalar loop: no pair's bits depend on the others.
        total = np.logaddexp.reduce(sums.numpy(), axis=0)
        nll = torch.from_numpy(total) - scores.sum(0)
        return nll.float().to(hidden.device)

    def recorder(self, most_bytes: int) -> Recorder:
        """Return what records a step, and its exchanges, on all ranks or on none."""
        if not self.collective.is_recordable:
            return eager
        return AgreedRecorder(super().recorder(most_bytes), self.part, self.collective, self.device)

    def _joined(self, part: Tensor) -> Tensor:
        return self.collective.sum(part)
