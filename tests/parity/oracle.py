"""transformers as the oracle, and the engine with its logits written down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import (
    Engine,
    EngineConfig,
    GenerateRequest,
    RankRequest,
    Result,
    SamplingParams,
)
from nightjar.gpu_worker.models import Decoder, load_model


class Pair:
    """One model directory, opened by transformers and by Nightjar."""

    def __init__(self, path: Path, dtype: str = "fp32") -> None:
        self.reference = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        directory = ModelDirectory.open(path)
        self.tokenizer = directory.tokenizer()
        self.vocab_size = directory.config.vocab_size
        self.model: Decoder = load_model(directory, dtype)

    def run(
        self,
        requests: Sequence[GenerateRequest | RankRequest],
        vectors: dict[str, torch.Tensor] | None = None,
    ) -> dict[int, Result]:
        """All results of these requests, computed together."""
        engine = Engine(self.model, self.tokenizer.token_bytes, EngineConfig())
        for key, value in (vectors or {}).items():
            engine.register_prompt_vectors(key, value)
        for request in requests:
            engine.submit(request)
        results = {}
        while engine.has_work:
            results |= {result.request_id: result for result in engine.step()}
        return results

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], torch.Tensor]:
        """One prompt alone: its tokens, and the logits [max_tokens, V] they were chosen from."""
        params = SamplingParams(max_tokens, ignore_eos=True)
        results, rows = self.run_written([GenerateRequest(0, prompt, params)])
        return results[0].token_ids, rows

    def run_written(
        self, requests: Sequence[GenerateRequest]
    ) -> tuple[dict[int, Result], torch.Tensor]:
        """All results of these requests, and every row of logits [n, V] on the way to them."""
        rows = []
        plain = self.model.logits

        def written(hidden: torch.Tensor) -> torch.Tensor:
            rows.append(plain(hidden).clone())
            return rows[-1].clone()

        self.model.logits = written  # type: ignore[method-assign]
        try:
            results = self.run(requests)
        finally:
            del self.model.logits
        return results, torch.cat(rows)

    @torch.no_grad()
    def embed(self, ids: Sequence[int], vectors: torch.Tensor | None = None) -> torch.Tensor:
        """Embeddings [n, H] of ids; one at or past the vocabulary reads a vector."""
        table = self.reference.get_input_embeddings().weight
        rows = [
            table[i] if vectors is None or i < self.vocab_size else vectors[i - self.vocab_size]
            for i in ids
        ]
        return torch.stack(rows)

    @torch.no_grad()
    def logits(self, ids: Sequence[int], vectors: torch.Tensor | None = None) -> torch.Tensor:
        """transformers' logits at every position: [n, V]."""
        if vectors is None:
            return self.reference(torch.tensor([list(ids)])).logits[0]
        return self.reference(inputs_embeds=self.embed(ids, vectors).unsqueeze(0)).logits[0]

    def nll(
        self,
        query: Sequence[int],
        document: Sequence[int],
        vectors: torch.Tensor | None = None,
    ) -> float:
        """Mean NLL of a document's real tokens in transformers' full-sequence log-softmax."""
        log_probs = self.logits([*query, *document], vectors).double().log_softmax(-1)
        places = [
            (len(query) + i - 1, token)
            for i, token in enumerate(document)
            if token < self.vocab_size
        ]
        return -sum(float(log_probs[row, token]) for row, token in places) / len(places)

    def check_greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Assert that a prompt's tokens and logits are transformers' own; returns the tokens."""
        tokens, found = self.greedy(prompt, max_tokens)
        expected = self.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        assert tokens == expected.argmax(-1).tolist()
        # Relative to the largest score of each row: near zero there is nothing to be relative to.
        largest = expected.abs().amax(-1, keepdim=True)
        torch.testing.assert_close(found / largest, expected / largest, rtol=0, atol=1e-4)
        return tokens
