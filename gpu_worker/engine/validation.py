"""Refuses requests that cannot be computed, before any computation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nightjar.checkpoints import ModelConfig
from nightjar.gpu_worker.engine.adapters import Tuning, Tunings
from nightjar.gpu_worker.engine.errors import RefusedError
from nightjar.gpu_worker.engine.kv_cache import BlockPool
from nightjar.gpu_worker.engine.ranking import LONG_DOCUMENT
from nightjar.gpu_worker.engine.sampling_checks import check_sampling
from nightjar.requests import GenerateRequest, RankRequest, Request, SamplingParams


class Validator:
    """Checks requests against one model, its cache, its prompt vectors and its adapters."""

    def __init__(
        self,
        config: ModelConfig,
        pool: BlockPool,
        tunings: Tunings,
        slots: int,
    ) -> None:
        """slots: sequences that may run at once."""
        self._config = config
        self._pool = pool
        self._tunings = tunings
        self._slots = slots

    def check(self, request: Request) -> Tuning:
        """Raise RefusedError, or return the request's prompt vectors and adapter."""
        tuning = self._tunings.find(request)
        rows = 0 if tuning.vectors is None else tuning.vectors.rows.shape[0]
        if isinstance(request, GenerateRequest):
            self._check_generate(request, rows)
        else:
            self._check_rank(request, rows)
        return tuning

    def _check_generate(self, request: GenerateRequest, rows: int) -> None:
        """Check a prompt, its parameters, and the room that it needs."""
        check_sampling(request.sampling, self._config.vocab_size)
        self._check_tokens("the prompt", request.token_ids, rows)
        params = request.sampling
        if params.beams is not None and params.beams.width > self._slots:
            raise RefusedError(
                "invalid_sampling",
                f"beam_width is {params.beams.width}, but at most {self._slots} sequences run "
                "together; lower it, or raise max_running and max_step_tokens",
            )
        prompt, asked = len(request.token_ids), params.max_tokens
        what = f"prompt of {prompt} tokens and max_tokens {asked}"
        what += f", {params.width} times" if params.width > 1 else ""
        self._check_room(what, prompt + asked, blocks_of_sequences(self._pool, prompt, params))

    def _check_rank(self, request: RankRequest, rows: int) -> None:
        """Check a query and its documents; each must fit into the context with the query."""
        self._check_tokens("the query", request.query_ids, rows)
        if not request.documents:
            raise RefusedError("empty_documents", "documents: the list is empty")
        if request.top_n is not None and (type(request.top_n) is not int or request.top_n < 1):
            raise RefusedError(
                "invalid_request", f"top_n is {request.top_n!r}: expected a whole number from 1 on"
            )
        query = len(request.query_ids)
        for index, document in enumerate(request.documents):
            name = f"document {index}"
            self._check_tokens(name, document, rows)
            if min(document) >= self._config.vocab_size:
                raise RefusedError(
                    "invalid_token", f"{name}: holds prompt vectors only, nothing to score"
                )
            size = len(document)
            what = f"query of {query} tokens and {name} of {size}"
            # All tokens but the last of a long document lie in the cache.
            cached = query + size - 1 if size > LONG_DOCUMENT else query
            self._check_room(what, query + size, self._pool.blocks_for(cached))

    def _check_tokens(self, name: str, tokens: Sequence[int], rows: int) -> None:
        """Check that there is a token, and that each is a row of the vocabulary or the vectors."""
        if not tokens:
            raise RefusedError("empty_input", f"{name} has no tokens")
        kinds = set(map(type, tokens))
        if wrong := [kind.__name__ for kind in kinds if not issubclass(kind, (int, np.integer))]:
            raise RefusedError(
                "invalid_token", f"{name}: token ids are whole numbers, not {', '.join(wrong)}"
            )
        vocab_size = self._config.vocab_size
        lowest, highest = min(tokens), max(tokens)
        if lowest < 0:
            raise RefusedError("invalid_token", f"{name}: token id {lowest} is negative")
        if highest >= vocab_size + rows:
            vectors = f"the request's {rows} prompt vectors" if rows else "no prompt vectors"
            raise RefusedError(
                "invalid_token",
                f"{name}: token id {highest} is past the vocabulary of {vocab_size} and {vectors}",
            )

    def _check_room(self, what: str, positions: int, blocks: int) -> None:
        """Check that the positions fit into the context, and the blocks into the whole cache."""
        context = self._config.context_length
        if positions > context:
            raise RefusedError(
                "context_exceeded",
                f"{what}: {positions} positions, but the model's context is {context}",
            )
        if blocks > self._pool.total:
            raise RefusedError(
                "cache_exceeded",
                f"{what}: needs {blocks} cache blocks of {self._pool.block_size} tokens, but the "
                f"cache has {self._pool.total}; raise NIGHTJAR_KV_CACHE_BYTES or shorten the "
                "request",
            )


def blocks_of_sequences(pool: BlockPool, prompt: int, params: SamplingParams) -> int:
    """Return the cache blocks that a prompt of so many tokens and all its sequences need.

    The last token generated is never fed back.  Several sequences share the prompt's whole blocks.
    """
    one = pool.blocks_for(prompt + params.max_tokens - 1)
    if params.width == 1:
        return one
    return pool.blocks_for(prompt) + params.width * (one - prompt // pool.block_size)
