"""The engine's loop: receive, schedule, forward, process."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from nightjar import kernels
from nightjar.gpu_worker.engine.admission import Admission
from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.engine.errors import RefusedError
from nightjar.gpu_worker.engine.executor import Executor
from nightjar.gpu_worker.engine.kv_cache import BlockPool
from nightjar.gpu_worker.engine.plan import Job, StepOutput, StepPlan
from nightjar.gpu_worker.engine.progress import Progress
from nightjar.gpu_worker.engine.prompt_vectors import PromptVectorStore
from nightjar.gpu_worker.engine.requests import RequestFailed, Result
from nightjar.gpu_worker.engine.rescue import NOT_FINITE, Rescue
from nightjar.gpu_worker.engine.scheduler import Scheduler
from nightjar.gpu_worker.engine.upkeep import CacheUpkeep, host_tier
from nightjar.gpu_worker.engine.windows import DecodeWindows
from nightjar.gpu_worker.models import Decoder, KVTensors
from nightjar.kernels.cuda.device import require_working
from nightjar.requests import Request

logger = logging.getLogger(__name__)

RESCUE_CACHE_BYTES = 4 << 30

GIVEN_UP = "windows of steps cannot be launched; going on step by step"

_PRECISIONS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


class Engine:
    """Continuous batching over one model.

    Requests of any number of micro-batches run together; a finished one's place is refilled at
    the next step.  Every request submitted gets exactly one result, from some later `step`, unless
    a step raises: then the device has failed for good, and the process that it failed in must end.
    """

    def __init__(
        self,
        model: Decoder,
        token_bytes: Sequence[bytes],
        config: EngineConfig,
        more_precise: Callable[[], Decoder] | None = None,
    ) -> None:
        """token_bytes: the raw bytes of each token id, b"" for special tokens.

        more_precise: loads the same model in a higher precision.  It is called when a request
        first meets scores that are not finite; such requests are computed again, by themselves.
        """
        model_config = model.config
        if len(token_bytes) != model_config.vocab_size:
            raise ValueError(
                f"token_bytes has {len(token_bytes)} entries, the model {model_config.vocab_size}"
            )
        self._cache = model.allocate_cache(_cache_blocks(model, config), config.block_size)
        self._tier = host_tier(model, self._cache, config)
        self._pool = BlockPool(self._cache.keys.shape[1], config.block_size, self._tier)
        step_blocks = config.max_step_tokens // config.block_size
        self._upkeep = CacheUpkeep(self._cache, self._pool, self._tier, step_blocks)
        self._vectors = PromptVectorStore(model_config.hidden_size, model.dtype, model.device)
        self._admission = Admission(model_config, config, self._pool, self._vectors)
        self._scheduler = Scheduler(config, self._pool, self._tier)
        self._progress = Progress(self._scheduler, token_bytes)
        self._executor = Executor(
            model,
            self._cache,
            self._vectors,
            config.banned_token_ids,
            self._upkeep.beside_compute,
        )
        self._windows: DecodeWindows | None = None
        if kernels.on_gpu(self._cache.keys) and not model.in_lockstep:
            self._windows = DecodeWindows(model, self._cache, self._upkeep, token_bytes, config)
        self._disturbed = False  # since the last plan: a request came or was taken out
        self._inbox: deque[Request] = deque()
        self._cancelled: set[int] = set()
        self._live: dict[int, Job] = {}
        self._arrivals = count()
        self._rescue: Rescue | None = None
        if more_precise is not None:
            self._rescue = Rescue(lambda: self._second(more_precise(), token_bytes, config))
        # Of a model that answers say they were computed in again; int8, for one, has FP32's dtype.
        self.precision = _PRECISIONS[model.dtype]

    def register_prompt_vectors(self, key: str, vectors: Tensor) -> None:
        """Make vectors [n, H] usable by requests submitted from now on."""
        self._vectors.register(key, vectors)
        if self._rescue is not None:
            self._rescue.register_prompt_vectors(key, vectors)

    def submit(self, request: Request) -> None:
        """Hand in a request; it joins the batch at the next step."""
        self._inbox.append(request)

    def cancel(self, request_id: int) -> None:
        """Drop a request at the next step; its result says `cancelled`.  Unknown ids are fine."""
        self._cancelled.add(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget the prefixes that earlier requests left in the cache and in the host's memory;
        the memory is kept."""
        self._pool.forget()

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        rescuing = self._rescue is not None and self._rescue.has_work
        return bool(self._inbox or self._cancelled or self._live or rescuing)

    def step(self) -> list[Result]:
        """One round of the loop; returns the requests that ended in it."""
        results = self._receive()
        if self._windows is not None and self._windows.in_flight:
            results.extend(self._land(self._windows))
        elif plan := self._schedule():
            if self._windows is not None and self._windows.serves(plan):
                results.extend(self._launch(self._windows, plan))
            else:
                results.extend(self._process(self._forward(plan)))
        if self._rescue is not None and self._rescue.has_work:
            results.extend(self._rescue.step())
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
            except Exception as error:
                logger.exception("request %s cannot be admitted", request.request_id)
                message = f"{type(error).__name__}: {error}"
                results.append(RequestFailed(request.request_id, "internal_error", message))
        for request_id in self._cancelled:
            job = self._live.get(request_id)
            if job is not None:
                results.append(self._fail(job, "cancelled", "the request was cancelled"))
            elif self._rescue is not None and self._rescue.holds(request_id):
                self._rescue.cancel(request_id)
        self._cancelled.clear()
        return results

    def _launch(self, windows: DecodeWindows, plan: StepPlan) -> list[Result]:
        """Let the plan's texts run on the device by themselves; if that raises, as everywhere
        else, from now on."""
        try:
            windows.start(plan.decodes, crowded=self._scheduler.has_waiting)
        except Exception:
            logger.exception(GIVEN_UP, extra={"action": "windows_given_up"})
            self._give_windows_up()
            return self._process(self._forward(plan))
        return []

    def _land(self, windows: DecodeWindows) -> list[Result]:
        """Launch the next window behind the one under way, and take that one in."""
        if not self._disturbed:
            try:
                windows.follow(crowded=self._scheduler.has_waiting)
            except Exception:
                logger.exception(GIVEN_UP, extra={"action": "windows_given_up"})
                self._give_windows_up()
        results: list[Result] = []
        for moved in windows.land():
            results += self._process(StepOutput(tokens=moved))
        return results

    def _give_windows_up(self) -> None:
        """Go on step by step, if the device still works."""
        self._require_working_device()
        self._windows = None

    def _schedule(self) -> StepPlan:
        """Who runs now, in cache blocks made ready for it."""
        self._disturbed = False
        plan = self._scheduler.schedule()
        plan.arrivals = self._upkeep.prepare(self._scheduler.take_copies())
        return plan

    def _forward(self, plan: StepPlan) -> StepOutput:
        """Compute the plan; if that raises, each request alone, so that only the culprit fails."""
        started = time.perf_counter()
        try:
            output = self._executor.run(plan)
        except Exception:
            logger.exception("a step failed; running its requests one by one")
            self._require_working_device()
        else:
            if self._tier is not None:
                self._tier.costs.stepped(plan, time.perf_counter() - started)
            return output
        whole = StepOutput()
        for job, single in plan.singles():
            try:
                whole.extend(self._executor.run(single))
            except Exception as error:
                logger.exception("request %d failed", job.request_id)
                self._require_working_device()
                whole.failures.append((job, error))
        return whole

    def _require_working_device(self) -> None:
        """Raise where an error is the device's own: what came after it would fail, too, and be
        blamed on requests that have no part in it."""
        require_working(self._cache.keys.device)

    def _process(self, output: StepOutput) -> list[Result]:
        """Move every request on by what the step computed; returns those that end."""
        output.record()
        results = self._leave(output)
        for work in output.done:
            if self._is_live(work.job):
                self._scheduler.settle(work)
        texts = [
            (sequence, choice)
            for sequence, choice in output.tokens
            if choice is not None and self._is_live(sequence.text)
        ]
        rankings = [job for job in output.rankings if self._is_live(job)]
        answers: list[Result] = [*self._progress.of_texts(texts)]
        answers += self._progress.of_rankings(rankings)
        for answer in answers:
            self._drop(self._live[answer.request_id])
        return results + answers

    def _leave(self, output: StepOutput) -> list[Result]:
        """Requests that the step failed or found not finite leave, before anything that they
        wrote is shared or copied; returns the failures."""
        results: list[Result] = []
        for job, error in output.failures:
            if self._is_live(job):  # several of its samples may have failed
                message = f"{type(error).__name__}: {error}"
                results.append(self._fail(job, "internal_error", message))
        for job in output.not_finite:
            if self._is_live(job):
                results.extend(self._not_finite(job))
        return results

    def _admit(self, request: Request) -> None:
        """Turn a request into a job in the scheduler's queue, or raise RefusedError."""
        rescued = self._rescue is not None and self._rescue.holds(request.request_id)
        if request.request_id in self._live or rescued:
            raise RefusedError("duplicate_request", "a request with this id is still running")
        self._enter(self._admission.admit(request, next(self._arrivals)))

    def _enter(self, job: Job) -> None:
        """Put a job into the scheduler's queue."""
        self._live[job.request_id] = job
        self._scheduler.add(job)
        self._disturbed = True

    def _is_live(self, job: Job) -> bool:
        """Whether the request has not ended yet."""
        return self._live.get(job.request_id) is job

    def _not_finite(self, job: Job) -> list[Result]:
        """Scores that are NaN or infinite: compute the request again in a higher precision, if
        there is one; but first by itself, if others may be to blame.

        A block is shared once its part of a prompt is computed, before any score vouches for it;
        and on a GPU a NaN reaches rows before its own, where attention weighs it with 0.
        """
        if job.is_on_trust:
            self._spoil(job)
            self._drop(job)
            self._enter(self._admission.admit_alone(job))
            return []
        if self._rescue is None:
            return [self._fail(job, "not_finite", NOT_FINITE)]
        logger.warning(
            "request %d: %s; computing it again in a higher precision", job.request_id, NOT_FINITE
        )
        self._disturbed = True
        self._spoil(job)
        self._drop(job)
        failure = self._rescue.submit(job.request)
        return [] if failure is None else [failure]

    def _fail(self, job: Job, code: str, message: str) -> RequestFailed:
        """End a request without an answer."""
        self._disturbed = True
        self._spoil(job)
        self._drop(job)
        return RequestFailed(job.request_id, code, message)

    def _spoil(self, job: Job) -> None:
        """Let nobody find what a request wrote: no finite scores vouch for it."""
        for table in job.tables:
            self._pool.taint(table.blocks)

    def _drop(self, job: Job) -> None:
        """Free what a request holds."""
        self._scheduler.remove(job)
        del self._live[job.request_id]

    def _second(self, model: Decoder, token_bytes: Sequence[bytes], config: EngineConfig) -> Engine:
        """An engine in a higher precision, with as many blocks as this one, so that what fits here
        fits there; but a cache of a GPU's size is more than the host has."""
        cache = self._pool.total * _block_bytes(model, config)
        cache = min(cache, RESCUE_CACHE_BYTES)
        return Engine(model, token_bytes, replace(config, kv_cache_bytes=cache, host_cache_bytes=0))


def _block_bytes(model: Decoder, config: EngineConfig) -> int:
    return KVTensors.block_bytes(model.config, config.block_size, model.cache_dtype)


def _cache_blocks(model: Decoder, config: EngineConfig) -> int:
    """Blocks of the cache: as many as its memory holds."""
    per_block = _block_bytes(model, config)
    affordable = config.kv_cache_bytes // per_block
    if affordable < 1:
        raise ValueError(f"kv_cache_bytes {config.kv_cache_bytes}: one block takes {per_block}")
    return affordable
