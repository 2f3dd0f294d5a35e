"""A plan through the model: to next tokens and document scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nightjar.gpu_worker.engine.packing import pack
from nightjar.gpu_worker.engine.prompt_vectors import PromptVectorStore
from nightjar.gpu_worker.engine.ranking import score_documents
from nightjar.gpu_worker.engine.sampling import next_tokens
from nightjar.gpu_worker.engine.sequence import RankPiece, StepOutput, StepPlan
from nightjar.gpu_worker.models import Decoder, KVTensors


class Executor:
    """Runs plans.  Holds no state of requests: a plan that failed may be run again in parts."""

    def __init__(
        self,
        model: Decoder,
        cache: KVTensors,
        vectors: PromptVectorStore,
        banned_token_ids: Sequence[int],
    ) -> None:
        self._model = model
        self._cache = cache
        self._vectors = vectors
        self._banned = torch.tensor(sorted(set(banned_token_ids)), dtype=torch.int64)
        self._block_size = cache.keys.shape[3]

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Compute one step: plan must not be empty."""
        hidden = self._hidden(plan)
        queries = sum(piece.runs_query for piece in plan.ranks)
        sizes = [len(plan.prefills), queries, len(plan.decodes)]
        prompt, query, running, documents = torch.split(
            hidden, [*sizes, hidden.shape[0] - sum(sizes)]
        )
        output = StepOutput()
        sequences = plan.prefills + plan.decodes
        if sequences:
            logits = self._model.logits(torch.cat((prompt, running)))
            tokens = next_tokens(logits, sequences, self._banned)
            output.tokens.extend(zip(sequences, tokens, strict=True))
        if plan.ranks:
            self._score(plan.ranks, query, documents, output)
        return output

    def _hidden(self, plan: StepPlan) -> Tensor:
        """The last hidden states of the plan's output rows: [N, H]."""
        if not plan.has_rows:
            return torch.empty(0, self._model.config.hidden_size, dtype=self._model.dtype)
        batch = pack(plan, self._vectors.rows, self._block_size)
        return self._model.forward(batch, self._cache)

    def _score(
        self, pieces: list[RankPiece], computed: Tensor, documents: Tensor, output: StepOutput
    ) -> None:
        """Score the pieces' documents.

        computed: [n, H], the last hidden states of the queries run in this step, in order;
        documents: [R, H], the documents' rows.
        """
        fresh = iter(computed)
        queries = torch.stack(
            [
                next(fresh) if piece.sequence.query_hidden is None else piece.sequence.query_hidden
                for piece in pieces
            ]
        )
        found = score_documents(
            self._model, queries, documents, [piece.documents for piece in pieces]
        )
        output.ranks.extend(zip(pieces, queries, found, strict=True))
