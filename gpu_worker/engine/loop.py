"""The engine's loop: receive, schedule, forward, process."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from itertools import count

import numpy as np
from torch import Tensor

from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.engine.errors import RefusedError
from nightjar.gpu_worker.engine.executor import Executor
from nightjar.gpu_worker.engine.kv_cache import BlockPool
from nightjar.gpu_worker.engine.logits_processors import LogitsProcessors
from nightjar.gpu_worker.engine.prompt_vectors import PromptVectorStore
from nightjar.gpu_worker.engine.requests import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    RankResult,
    Request,
    RequestFailed,
    Result,
)
from nightjar.gpu_worker.engine.scheduler import Scheduler
from nightjar.gpu_worker.engine.sequence import (
    Choice,
    GenerateSequence,
    RankPiece,
    RankSequence,
    StepOutput,
    StepPlan,
)
from nightjar.gpu_worker.engine.stopping import StopMatcher, end_tokens
from nightjar.gpu_worker.engine.validation import Validator
from nightjar.gpu_worker.models import Decoder, KVTensors

logger = logging.getLogger(__name__)

Live = GenerateSequence | RankSequence


class Engine:
    """Continuous batching over one model.

    Requests of any number of micro-batches run together; a finished one's place is refilled at
    the next step.  Every request submitted gets exactly one result, from some later `step`.
    """

    def __init__(self, model: Decoder, token_bytes: Sequence[bytes], config: EngineConfig) -> None:
        """token_bytes: the raw bytes of each token id, b"" for special tokens."""
        model_config = model.config
        if len(token_bytes) != model_config.vocab_size:
            raise ValueError(
                f"token_bytes has {len(token_bytes)} entries, the model {model_config.vocab_size}"
            )
        self._token_bytes = token_bytes
        eos = config.eos_token_ids
        self._eos = frozenset(model_config.eos_token_ids if eos is None else eos)
        self._pool = BlockPool(_cache_blocks(model, config), config.block_size)
        self._cache = KVTensors.allocate(
            model_config, self._pool.total, config.block_size, model.dtype, model.device
        )
        self._vectors = PromptVectorStore(model_config.hidden_size, model.dtype)
        self._validator = Validator(model_config, self._pool, self._vectors)
        self._scheduler = Scheduler(config, self._pool)
        self._executor = Executor(model, self._cache, self._vectors, config.banned_token_ids)
        self._inbox: deque[Request] = deque()
        self._cancelled: set[int] = set()
        self._live: dict[int, Live] = {}
        self._arrivals = count()

    def register_prompt_vectors(self, key: str, vectors: Tensor) -> None:
        """Make vectors [n, H] usable by requests submitted from now on."""
        self._vectors.register(key, vectors)

    def submit(self, request: Request) -> None:
        """Hand in a request; it joins the batch at the next step."""
        self._inbox.append(request)

    def cancel(self, request_id: int) -> None:
        """Drop a request at the next step; its result says `cancelled`.  Unknown ids are fine."""
        self._cancelled.add(request_id)

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._inbox or self._cancelled or self._live)

    def step(self) -> list[Result]:
        """One round of the loop; returns the requests that ended in it."""
        results = self._receive()
        plan = self._schedule()
        if plan:
            results.extend(self._process(self._forward(plan)))
        return results

    def _receive(self) -> list[Result]:
        """Take in new requests and cancellations; returns those that end here."""
        results: list[Result] = []
        while self._inbox:
            request = self._inbox.popleft()
            try:
                self._admit(request)
            except RefusedError as refusal:
                results.append(RequestFailed(request.request_id, refusal.code, str(refusal)))
            except (TypeError, ValueError, OverflowError) as error:
                message = f"{type(error).__name__}: {error}"
                results.append(RequestFailed(request.request_id, "invalid_request", message))
        for request_id in self._cancelled:
            sequence = self._live.get(request_id)
            if sequence is not None:
                results.append(self._fail(sequence, "cancelled", "the request was cancelled"))
        self._cancelled.clear()
        return results

    def _schedule(self) -> StepPlan:
        """Who runs now, in cache blocks made clean for it."""
        plan = self._scheduler.schedule()
        self._cache.clear(self._pool.take_fresh())
        return plan

    def _forward(self, plan: StepPlan) -> StepOutput:
        """Compute the plan; if that raises, each request alone, so that only the culprit fails."""
        try:
            return self._executor.run(plan)
        except Exception:
            logger.exception("a step failed; running its requests one by one")
        whole = StepOutput()
        for single in plan.singles():
            sequence = single.sequences[0]
            try:
                output = self._executor.run(single)
            except Exception as error:
                logger.exception("request %d failed", sequence.request_id)
                whole.failures.append((sequence, error))
            else:
                whole.tokens.extend(output.tokens)
                whole.ranks.extend(output.ranks)
        return whole

    def _process(self, output: StepOutput) -> list[Result]:
        """Move every request on by what the step computed; returns the finished ones."""
        results = [self._append(sequence, token) for sequence, token in output.tokens]
        results.extend(self._add_scores(*scores) for scores in output.ranks)
        results.extend(
            self._fail(sequence, "internal_error", f"{type(error).__name__}: {error}")
            for sequence, error in output.failures
        )
        return [result for result in results if result is not None]

    def _admit(self, request: Request) -> None:
        """Turn a request into a sequence in the scheduler's queue, or raise RefusedError."""
        if request.request_id in self._live:
            raise RefusedError("duplicate_request", "a request with this id is still running")
        base = self._validator.check(request)
        arrival = next(self._arrivals)
        sequence: Live
        if isinstance(request, GenerateRequest):
            params, prompt = request.sampling, list(request.token_ids)
            ends = end_tokens(params, self._eos)
            processors = None
            if LogitsProcessors.needed(params):
                processors = LogitsProcessors(params, prompt, ends, len(self._token_bytes))
            matcher = StopMatcher(params.stop, params.min_tokens)
            sequence = GenerateSequence(
                request.request_id, prompt, params, matcher, base, arrival, ends, processors
            )
        else:
            documents = [list(document) for document in request.documents]
            query = list(request.query_ids)
            sequence = RankSequence(request.request_id, query, documents, base, arrival)
        self._live[request.request_id] = sequence
        self._scheduler.add(sequence)

    def _append(self, sequence: GenerateSequence, choice: Choice | None) -> Result | None:
        """Add a token to a text, and end it where it is due: a stop wins over the length."""
        if choice is None:
            return self._fail(sequence, "not_finite", "the model's scores are NaN or infinite")
        sequence.generated.append(choice.token)
        if choice.logprobs is not None:
            sequence.logprobs.append(choice.logprobs)
        reason = sequence.ends.get(choice.token)
        if reason is not None:
            return self._finish(sequence, reason, None)
        piece = self._token_bytes[choice.token]
        sequence.pieces.append(piece)
        begin = sequence.matcher.feed(piece)
        if begin is not None:
            return self._finish(sequence, "stop", begin)
        if len(sequence.generated) == sequence.sampling.max_tokens:
            return self._finish(sequence, "length", None)
        return None

    def _finish(
        self, sequence: GenerateSequence, reason: FinishReason, end: int | None
    ) -> GenerateResult:
        """End a text after `end` bytes, or after all of them."""
        self._drop(sequence)
        output = sequence.output(reason, end)
        return GenerateResult(sequence.request_id, [output], len(sequence.prompt))

    def _add_scores(
        self, piece: RankPiece, query_hidden: Tensor, nll: list[np.ndarray]
    ) -> Result | None:
        """Add a step's document scores to a ranking; the last ones finish it."""
        sequence = piece.sequence
        sequence.query_hidden = query_hidden
        sequence.next_document = piece.end
        sequence.mean_nll.extend(float(scores.mean()) for scores in nll)
        sequence.token_counts.extend(len(scores) for scores in nll)
        if piece.end < len(sequence.documents):
            return None
        if not np.isfinite(sequence.mean_nll).all():
            return self._fail(sequence, "not_finite", "the model's scores are NaN or infinite")
        self._drop(sequence)
        tokens = len(sequence.query)
        return RankResult(sequence.request_id, sequence.mean_nll, sequence.token_counts, tokens)

    def _fail(self, sequence: Live, code: str, message: str) -> RequestFailed:
        """End a request without an answer."""
        self._drop(sequence)
        return RequestFailed(sequence.request_id, code, message)

    def _drop(self, sequence: Live) -> None:
        """Free what a request holds."""
        self._scheduler.remove(sequence)
        del self._live[sequence.request_id]


def _cache_blocks(model: Decoder, config: EngineConfig) -> int:
    """Blocks of the cache: what the memory allows, but no more than could ever be in use."""
    per_block = KVTensors.block_bytes(model.config, config.block_size, model.dtype)
    affordable = config.kv_cache_bytes // per_block
    if affordable < 1:
        raise ValueError(f"kv_cache_bytes {config.kv_cache_bytes}: one block takes {per_block}")
    longest = -(-model.config.context_length // config.block_size)
    return min(affordable, config.max_running * longest + config.max_step_tokens)
