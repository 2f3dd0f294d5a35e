"""Runs a plan through the model; gives next tokens and document scores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nightjar import kernels
from nightjar.gpu_worker.engine.packing import pack
from nightjar.gpu_worker.engine.plan import PrefixChunk, StepOutput, StepPlan
from nightjar.gpu_worker.engine.ranking import Branch
from nightjar.gpu_worker.engine.sampling import next_tokens
from nightjar.gpu_worker.engine.sequence import Prefix
from nightjar.gpu_worker.models import Decoder, KVTensors
from nightjar.gpu_worker.models.decode_steps import DecodeSteps

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Rows:
    """The hidden states of a step, [N, H], and the index of each wanted row.

    ends: the row of each prefix's last token, for prefixes that are read in this step.
    chunks: the first wanted row of each chunk; decodes: the first row of the running sequences;
    documents: the first row of the documents.
    """

    hidden: Tensor
    ends: dict[int, int]
    chunks: list[int]
    decodes: int
    documents: int


class Executor:
    """Runs plans. It holds no state of requests, so a failed plan may be run again in parts."""

    def __init__(
        self,
        model: Decoder,
        cache: KVTensors,
        banned_token_ids: Sequence[int],
        beside_compute: Callable[[], None],
        steps: DecodeSteps | None = None,
    ) -> None:
        """steps: run forward passes where there are some, as on a GPU; else the model does.

        beside_compute: called in every step after its forward pass is launched, before the host
        waits for the results.
        """
        self._model = model
        self._cache = cache
        banned = sorted(set(banned_token_ids))
        self._banned = torch.tensor(banned, dtype=torch.int64, device=model.device)
        self._block_size = cache.keys.shape[3]
        self._beside_compute = beside_compute
        self._steps = steps

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Compute one step; the plan must not be empty."""
        rows = self._forward(plan)
        self._beside_compute()
        output = StepOutput(done=[*plan.prompts, *plan.ranks])
        output.hidden.extend(  # a clone, because a view would keep the whole step's rows
            (chunk.prefix, rows.hidden[rows.ends[id(chunk.prefix)]].clone())
            for chunk in plan.chunks
            if chunk.finishes
        )
        self._sample(plan, rows, output)
        self._score(plan, rows, output)
        return output

    def run_one_by_one(self, plan: StepPlan, check_device: Callable[[], None]) -> StepOutput:
        """Compute each request of a plan alone, so that only those that raise fail.

        check_device: raises where the device itself has failed. Else every later request would fail
        and take the blame.
        """
        whole = StepOutput()
        for job, single in plan.singles():
            try:
                whole.extend(self.run(single))
            except Exception as error:
                logger.exception("request %d failed", job.request_id)
                check_device()
                whole.failures.append((job, error))
        return whole

    def _forward(self, plan: StepPlan) -> Rows:
        """Compute the last hidden states of the plan's wanted rows.

        Prefixes that were computed earlier and are now predicted from are among them.
        """
        chunks = list(plan.chunks)
        fed = any(branch.depth > 1 for branch in plan.branches)
        model = self._model
        hidden = torch.empty(0, model.config.hidden_size, dtype=model.dtype, device=model.device)
        if chunks or plan.decodes or fed:
            batch = pack(plan, model.config.vocab_size, self._block_size)
            if self._steps is None:
                hidden = model.forward(batch.to(model.device), self._cache)
            else:
                hidden = self._steps.forward(batch)
        rows = Rows(hidden, {}, [], 0, 0)
        row = 0
        for chunk in chunks:
            rows.chunks.append(row)
            row += chunk.end - chunk.wanted_from
            if chunk.finishes:
                rows.ends[id(chunk.prefix)] = row - 1
        rows.decodes = row
        rows.documents = row + len(plan.decodes)
        self._add_earlier(plan, rows)
        return rows

    def _add_earlier(self, plan: StepPlan, rows: Rows) -> None:
        """Append the kept hidden states of prefixes that were computed in earlier steps."""
        read = [prompt.job.prefix for prompt in plan.prompts if prompt.starts]
        read += [branch.part.prefix for branch in plan.branches]
        kept: list[Tensor] = []
        for prefix in read:
            if id(prefix) not in rows.ends:
                rows.ends[id(prefix)] = rows.hidden.shape[0] + len(kept)
                kept.append(_kept(prefix))
        if kept:
            rows.hidden = torch.cat((rows.hidden, torch.stack(kept)))

    def _sample(self, plan: StepPlan, rows: Rows, output: StepOutput) -> None:
        """Sample the next token of every sequence."""
        sequences = plan.sampled
        if not sequences:
            return
        starts = [prompt for prompt in plan.prompts for _ in prompt.starts]
        sources = [rows.ends[id(prompt.job.prefix)] for prompt in starts]
        sources.extend(range(rows.decodes, rows.documents))
        # Samples of one prompt start from one row of logits.
        unique = list(dict.fromkeys(sources))
        hidden = rows.hidden
        # Mostly every row is sampled. Then no copy is made: torch would wake its threads for it.
        if unique != list(range(hidden.shape[0])):
            hidden = hidden.index_select(0, kernels.upload(torch.tensor(unique), hidden.device))
        logits = self._model.logits(hidden)
        if len(unique) < len(sources):
            positions = {row: position for position, row in enumerate(unique)}
            again = torch.tensor([positions[row] for row in sources])
            logits = logits.index_select(0, kernels.upload(again, logits.device))
        tokens = next_tokens(logits, sequences, self._banned)
        output.tokens.extend(zip(sequences, tokens, strict=True))

    def _score(self, plan: StepPlan, rows: Rows, output: StepOutput) -> None:
        """Compute the NLLs of the scored tokens of prefixes and documents."""
        sources: list[np.ndarray] = []
        targets: list[np.ndarray] = []
        parts = [part for rank in plan.ranks for part, _ in rank.chunks]
        first = len(list(plan.chunks)) - len(parts)
        chunks = [chunk for rank in plan.ranks for _, chunk in rank.chunks]
        for chunk, row in zip(chunks, rows.chunks[first:], strict=True):
            tokens = _scored_in(chunk)
            sources.append(row + np.arange(len(tokens)))
            targets.append(np.asarray(tokens, dtype=np.int64))
        row = rows.documents
        for branch in plan.branches:
            source = np.arange(row - 1, row - 1 + branch.depth)
            source[0] = rows.ends[id(branch.part.prefix)]
            row += branch.depth - 1
            sources.append(source)
            targets.append(np.asarray(_seen(branch), dtype=np.int64))
        if not sources:
            return
        found = iter(self._nll(rows.hidden, sources, targets))
        output.shared.extend((part, next(found)) for part in parts)
        output.probes.extend((branch, next(found)) for branch in plan.branches)

    def _nll(
        self, hidden: Tensor, sources: list[np.ndarray], targets: list[np.ndarray]
    ) -> list[np.ndarray]:
        """Return float64[n] per list of targets: NLLs of targets[i][j] after hidden[sources[i][j]].

        Ids past the vocabulary are prompt vectors: they are read and not scored, so they are left
        out.
        """
        vocab_size = self._model.config.vocab_size
        real = [target < vocab_size for target in targets]
        rows = np.concatenate([s[mask] for s, mask in zip(sources, real, strict=True)])
        wanted = np.concatenate([t[mask] for t, mask in zip(targets, real, strict=True)])
        if not rows.size:
            return [np.empty(0) for _ in targets]
        order = np.argsort(rows, kind="stable")
        used, compact = np.unique(rows[order], return_inverse=True)
        arrays = (used, compact, wanted[order])
        given = (torch.from_numpy(array) for array in arrays)
        read, positions, tokens = (kernels.upload(array, hidden.device) for array in given)
        found = self._model.token_nll(hidden[read], positions, tokens)
        nll = np.empty(rows.size, dtype=np.float64)
        nll[order] = found.cpu().numpy()
        sizes = np.cumsum([int(mask.sum()) for mask in real])
        return np.split(nll, sizes[:-1])


def _kept(prefix: Prefix) -> Tensor:
    """Return the last hidden state of a prefix that was computed in an earlier step."""
    if prefix.last_hidden is None:
        raise RuntimeError("a prefix is read before it is computed")
    return prefix.last_hidden


def _scored_in(chunk: PrefixChunk) -> list[int]:
    """Return the scored tokens of a prefix that this chunk's rows predict."""
    return chunk.prefix.tokens[chunk.wanted_from + 1 : chunk.end + 1]


def _seen(branch: Branch) -> list[int]:
    """Return the document's tokens that this probe scores."""
    return branch.document.tokens[: branch.depth]
