"""The engine's loop: receive, schedule, forward, process."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from itertools import count

from torch import Tensor

from nightjar.gpu_worker.engine.admission import Admission
from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.engine.executor import Executor
from nightjar.gpu_worker.engine.kv_cache import BlockPool
from nightjar.gpu_worker.engine.plan import StepOutput, StepPlan
from nightjar.gpu_worker.engine.prompt_vectors import PromptVectorStore
from nightjar.gpu_worker.engine.ranking import RankJob
from nightjar.gpu_worker.engine.requests import (
    FinishReason,
    GenerateResult,
    RankResult,
    Request,
    RequestFailed,
    Result,
)
from nightjar.gpu_worker.engine.scheduler import Scheduler
from nightjar.gpu_worker.engine.sequence import GenerateSequence, TextJob
from nightjar.gpu_worker.engine.validation import RefusedError
from nightjar.gpu_worker.models import Decoder, KVTensors

logger = logging.getLogger(__name__)

Job = TextJob | RankJob


class Engine:
    """Continuous batching over one model.

    Requests of any number of micro-batches run together; a finished one's place is refilled at
    the next step.  Every request submitted gets exactly one result, from some later `step`.
    """

    def __init__(
        self,
        model: Decoder,
        token_bytes: Sequence[bytes],
        config: EngineConfig,
    ) -> None:
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
        self._admission = Admission(model_config, self._pool, self._vectors)
        self._scheduler = Scheduler(config, self._pool)
        self._executor = Executor(model, self._cache, self._vectors, config.banned_token_ids)
        self._inbox: deque[Request] = deque()
        self._cancelled: set[int] = set()
        self._live: dict[int, Job] = {}
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
            job = self._live.get(request_id)
            if job is not None:
                results.append(self._fail(job, "cancelled", "the request was cancelled"))
        self._cancelled.clear()
        return results

    def _schedule(self) -> StepPlan:
        """Who runs now, in cache blocks made ready for it."""
        plan = self._scheduler.schedule()
        self._cache.copy(self._scheduler.take_copies())
        self._cache.clear(self._pool.take_dirty())
        return plan

    def _forward(self, plan: StepPlan) -> StepOutput:
        """Compute the plan; if that raises, each request alone, so that only the culprit fails."""
        try:
            return self._executor.run(plan)
        except Exception:
            logger.exception("a step failed; running its requests one by one")
        whole = StepOutput()
        for job, single in plan.singles():
            try:
                whole.extend(self._executor.run(single))
            except Exception as error:
                logger.exception("request %d failed", job.request_id)
                whole.failures.append((job, error))
        return whole

    def _process(self, output: StepOutput) -> list[Result]:
        """Move every request on by what the step computed; returns the finished ones."""
        results: list[Result] = []
        for job, error in output.failures:
            if job.request_id in self._live:  # several of its samples may have failed
                message = f"{type(error).__name__}: {error}"
                results.append(self._fail(job, "internal_error", message))
        for prefix, hidden in output.hidden:
            prefix.last_hidden = hidden
        for part, nll in output.shared:
            part.shared_nll.append(nll)
        for work in output.done:
            self._scheduler.settle(work)
        for sequence, token in output.tokens:
            if sequence.request_id in self._live:
                results.extend(self._append(sequence, token))
        looked_at: dict[RankJob, None] = {}
        for branch, nll in output.looks:
            branch.job.add(branch, nll)
            looked_at[branch.job] = None
        for ranking in looked_at:
            results.extend(self._conclude(ranking))
        return results

    def _admit(self, request: Request) -> None:
        """Turn a request into a job in the scheduler's queue, or raise RefusedError."""
        if request.request_id in self._live:
            raise RefusedError("duplicate_request", "a request with this id is still running")
        job = self._admission.admit(request, next(self._arrivals))
        self._live[request.request_id] = job
        self._scheduler.add(job)

    def _append(self, sequence: GenerateSequence, token: int | None) -> list[Result]:
        """Add a token to a text, and end it where it is due: a stop wins over the length."""
        if token is None:
            return [self._not_finite(sequence.text)]
        sequence.generated.append(token)
        if token in self._eos and not sequence.sampling.ignore_eos:
            return self._finish(sequence, "eos", None)
        piece = self._token_bytes[token]
        sequence.pieces.append(piece)
        begin = sequence.matcher.feed(piece)
        if begin is not None:
            return self._finish(sequence, "stop", begin)
        if len(sequence.generated) == sequence.sampling.max_tokens:
            return self._finish(sequence, "length", None)
        return []

    def _finish(
        self, sequence: GenerateSequence, reason: FinishReason, end: int | None
    ) -> list[Result]:
        """End a text after `end` bytes, or after all of them, and its request with the last."""
        job = sequence.text
        job.finished[sequence.sample] = sequence.output(reason, end)
        self._scheduler.finish(sequence)
        if job.waiting or job.running:
            return []
        self._drop(job)
        outputs = [output for _, output in sorted(job.finished.items())]
        return [GenerateResult(job.request_id, outputs, len(job.prefix.tokens))]

    def _conclude(self, job: RankJob) -> list[Result]:
        """Drop what the last looks made hopeless; the ranking ends when no document waits."""
        if not job.is_finite:
            return [self._not_finite(job)]
        job.prune()
        self._scheduler.close_parts(job)
        if job.waiting:
            return []
        self._drop(job)
        query = len(job.request.query_ids)
        return [RankResult(job.request_id, job.scores(), job.token_counts, query)]

    def _not_finite(self, job: Job) -> Result:
        """Scores that are NaN or infinite: what the request wrote is worth nothing to others."""
        for table in job.tables:
            self._pool.taint(table.blocks)
        return self._fail(job, "not_finite", "the model's scores are NaN or infinite")

    def _fail(self, job: Job, code: str, message: str) -> RequestFailed:
        """End a request without an answer."""
        self._drop(job)
        return RequestFailed(job.request_id, code, message)

    def _drop(self, job: Job) -> None:
        """Free what a request holds."""
        self._scheduler.remove(job)
        del self._live[job.request_id]


def _cache_blocks(model: Decoder, config: EngineConfig) -> int:
    """Blocks of the cache: what the memory allows, but no more than could ever be in use."""
    per_block = KVTensors.block_bytes(model.config, config.block_size, model.dtype)
    affordable = config.kv_cache_bytes // per_block
    if affordable < 1:
        raise ValueError(f"kv_cache_bytes {config.kv_cache_bytes}: one block takes {per_block}")
    return affordable
