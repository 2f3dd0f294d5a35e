"""Checks requests and makes jobs of them for the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from nightjar.checkpoints import ModelConfig
from nightjar.gpu_worker.engine.adapters import Tuning, Tunings
from nightjar.gpu_worker.engine.beams import BeamState
from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.engine.errors import RefusedError
from nightjar.gpu_worker.engine.kv_cache import BlockPool, prefix_keys
from nightjar.gpu_worker.engine.ranking import (
    Document,
    RankJob,
    RankPart,
    apart_if_long,
    shared_beginnings,
)
from nightjar.gpu_worker.engine.requests import RequestFailed
from nightjar.gpu_worker.engine.sequence import GenerateJob, GenerateSequence, Prefix
from nightjar.gpu_worker.engine.stopping import StopMatcher, end_tokens
from nightjar.gpu_worker.engine.validation import Validator, blocks_of_sequences
from nightjar.requests import GenerateRequest, RankRequest, Request

logger = logging.getLogger(__name__)


class Admission:
    """Checks requests and turns them into jobs."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        pool: BlockPool,
        tunings: Tunings,
    ) -> None:
        self._vocab_size = model.vocab_size
        eos = config.eos_token_ids
        self._eos = frozenset(model.eos_token_ids if eos is None else eos)
        self._pool = pool
        self._validator = Validator(model, pool, tunings, config.slots)

    def admit(self, request: Request, arrival: int) -> GenerateJob | RankJob:
        """Make the job of a request.

        arrival: the request's number in the order of arrival of both kinds of request.

        Raises:
            RefusedError: The request cannot be computed.
        """
        tuning = self._validator.check(request)
        if isinstance(request, GenerateRequest):
            return self._generate_job(request, arrival, tuning)
        return self._ranking(request, arrival, tuning)

    def admit_alone(self, job: GenerateJob | RankJob) -> GenerateJob | RankJob:
        """Make a new job of the same request, which shares no block with others."""
        if isinstance(job, GenerateJob):
            opened = self._generate_job(job.request, job.arrival, job.prefix.tuning)
            opened.prefix.keys = []
            return opened
        ranking = self._ranking(job.request, job.arrival, job.parts[0].prefix.tuning)
        for part in ranking.parts:
            part.prefix.keys = []
        return ranking

    def _generate_job(self, request: GenerateRequest, arrival: int, tuning: Tuning) -> GenerateJob:
        """Make the job of a prompt and the sequences that follow it."""
        params = request.sampling
        blocks = blocks_of_sequences(self._pool, len(request.token_ids), params)
        prefix = self._prefix(list(request.token_ids), tuning, len(request.token_ids), blocks)
        job = GenerateJob(request, arrival, prefix, end_tokens(params, self._eos), self._vocab_size)
        if params.beams is not None:
            job.beams = BeamState(params.beams)
        for sample in range(params.n if params.beams is None else 1):
            matcher = StopMatcher(params.stop, params.min_tokens)
            job.waiting.append(GenerateSequence(job, sample, matcher, job.make_processors()))
        return job

    def _ranking(self, request: RankRequest, arrival: int, tuning: Tuning) -> RankJob:
        """Make the job of a query and its documents, in parts that share a prefix."""
        query = list(request.query_ids)
        documents = [list(document) for document in request.documents]
        room = self._pool.total * self._pool.block_size - len(query)
        parts = []
        groups = shared_beginnings(documents, room)
        for length, members in apart_if_long(groups, documents):
            tokens = query + documents[members[0]][:length]
            blocks = self._pool.blocks_for(len(tokens))
            part = RankPart(self._prefix(tokens, tuning, len(query), blocks), [])
            for index in members:
                document = documents[index]
                part.documents.append(Document(index, document[length:], self._scored(document)))
            parts.append(part)
        return RankJob(request, arrival, parts)

    def _prefix(self, tokens: list[int], tuning: Tuning, scored_from: int, blocks: int) -> Prefix:
        """Make a prefix of tokens, with the keys by which its blocks are found.

        Ids past the vocabulary name rows of the prompt vectors, so their salt is part of the keys.
        An adapter changes the keys and values of every token.
        """
        salt = tuning.salt(reads_vectors=max(tokens) >= self._vocab_size)
        keys = prefix_keys(tokens, self._pool.grain, salt)
        return Prefix(tokens, tuning, keys, scored_from, blocks)

    def _scored(self, document: Sequence[int]) -> int:
        """Return how many of a document's tokens are scored."""
        return sum(token < self._vocab_size for token in document)


def refusal(request_id: int, error: Exception) -> RequestFailed:
    """Return the failure of a request whose admission raised."""
    if isinstance(error, RefusedError):
        return RequestFailed(request_id, error.code, str(error))
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, TypeError | ValueError | OverflowError):
        return RequestFailed(request_id, "invalid_request", message)
    logger.error("request %s cannot be admitted", request_id, exc_info=error)
    return RequestFailed(request_id, "internal_error", message)
