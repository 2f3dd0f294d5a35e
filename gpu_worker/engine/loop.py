"""The engine's loop: receive, schedule, forward, process."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from torch import Tensor

from nightjar import kernels
from nightjar.gpu_worker.engine.adapters import Tunings
from nightjar.gpu_worker.engine.admission import Admission, refusal
from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.engine.errors import RefusedError
from nightjar.gpu_worker.engine.executor import Executor
from nightjar.gpu_worker.engine.kv_cache import BlockPool
from nightjar.gpu_worker.engine.plan import Job, StepOutput, StepPlan
from nightjar.gpu_worker.engine.progress import Progress
from nightjar.gpu_worker.engine.requests import RequestFailed, Result
from nightjar.gpu_worker.engine.rescue import NOT_FINITE, Rescue
from nightjar.gpu_worker.engine.scheduler import Scheduler
from nightjar.gpu_worker.engine.sizing import cache_blocks, rescue_config
from nightjar.gpu_worker.engine.statistics import EngineStatistics, Meter
from nightjar.gpu_worker.engine.upkeep import CacheUpkeep, host_tier
from nightjar.gpu_worker.engine.windows import DecodeWindows
from nightjar.gpu_worker.models import Decoder
from nightjar.gpu_worker.models.precision import COMPUTED_IN
from nightjar.kernels.device import require_working
from nightjar.requests import Request

logger = logging.getLogger(__name__)

GIVEN_UP = "windows of steps cannot be launched; going on step by step"


class Engine:
    """Continuous batching over one model.

    Requests of any number of micro-batches run together. The slot of a finished request is refilled
    at the next step. Every submitted request gets exactly one result, from some later `step`. A
    step raises only when the device has failed for good; the process must end then.
    The parts of an engine are public for reading; `live` holds the unfinished jobs.
    """

    def __init__(
        self,
        model: Decoder,
        token_bytes: Sequence[bytes],
        config: EngineConfig,
        more_precise: Callable[[], Decoder] | None = None,
        tunings: Tunings | None = None,
    ) -> None:
        """token_bytes: the raw bytes of each token id, b"" for special tokens.

        more_precise: loads the same model in a higher precision. It is called when a request
        first meets scores that are not finite. Such requests are computed again there.
        tunings: the prompt vectors and adapters, if another engine shares them.
        """
        model_config = model.config
        if len(token_bytes) != model_config.vocab_size:
            raise ValueError(
                f"token_bytes has {len(token_bytes)} entries, the model {model_config.vocab_size}"
            )
        self.cache = model.allocate_cache(
            cache_blocks(model, config), config.block_size, fp8=config.fp8_cache
        )
        self.tier = host_tier(model, self.cache, config)
        self.pool = BlockPool(self.cache.keys.shape[1], config.block_size, self.tier)
        step_blocks = config.max_step_tokens // config.block_size
        self._upkeep = CacheUpkeep(self.cache, self.pool, self.tier, step_blocks)
        if tunings is None:
            tunings = Tunings(model_config, model.device, model.no_adapters)
        self._tunings = tunings
        self._admission = Admission(model_config, config, self.pool, self._tunings)
        self.scheduler = Scheduler(config, self.pool, self.tier)
        self._meter = Meter(config.slots)
        self._progress = Progress(self.scheduler, token_bytes, self._meter)
        self.windows: DecodeWindows | None = None
        if kernels.on_gpu(self.cache.keys):
            self.windows = DecodeWindows(model, self.cache, self._upkeep, token_bytes, config)
        self.executor = Executor(
            model,
            self.cache,
            config.banned_token_ids,
            self._upkeep.beside_compute,
            None if self.windows is None else self.windows.steps,
        )
        self._disturbed = False  # a request came or was taken out since the last plan
        self._inbox: deque[Request] = deque()
        self._cancelled: set[int] = set()
        self.live: dict[int, Job] = {}
        self._arrivals = count()
        self.rescue: Rescue | None = None
        if more_precise is not None:
            self.rescue = Rescue(lambda: self._second(more_precise(), token_bytes, config))
        self.precision = COMPUTED_IN[model.dtype]  # answers report it as `recomputed_in`

    def register_prompt_vectors(self, key: str, vectors: Tensor) -> None:
        """Make vectors [n, H] usable by requests submitted from now on."""
        self._tunings.vectors.register(key, vectors)

    def register_adapter(self, key: str, factors: Mapping[str, Tensor]) -> None:
        """Make a LoRA adapter usable by requests submitted from now on; see AdapterStore."""
        self._tunings.adapters.register(key, factors)

    def forget(self, key: str) -> None:
        """Drop vectors or an adapter; requests that run keep theirs until they end."""
        self._tunings.forget(key)

    def submit(self, request: Request) -> None:
        """Hand in a request; it joins the batch at the next step."""
        self._inbox.append(request)

    def cancel(self, request_id: int) -> None:
        """Drop a request at the next step; its result says `cancelled`. Unknown ids are ignored."""
        self._cancelled.add(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget the prefixes of earlier requests, in the cache and in the host tier.

        No memory is freed.
        """
        self.pool.forget()

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        rescuing = self.rescue is not None and self.rescue.has_work
        return bool(self._inbox or self._cancelled or self.live or rescuing)

    def step(self) -> list[Result]:
        """Run one round of the loop and return the requests that ended in it."""
        with self._meter.phase("receive"):
            results = self._receive()
        if self.windows is not None and self.windows.in_flight:
            results.extend(self._land(self.windows))
        elif plan := self._schedule():
            results.extend(self._run(plan))
        if self.rescue is not None and self.rescue.has_work:
            with self._meter.phase("recompute"):
                results.extend(self.rescue.step())
        return results

    def statistics(self) -> EngineStatistics:
        """What the engine has counted so far, and how full it is."""
        return self._meter.read(self.scheduler, self.pool, len(self._inbox))

    def _receive(self) -> list[Result]:
        """Apply new requests and cancellations; return the results of requests that end here."""
        results: list[Result] = []
        while self._inbox:
            request = self._inbox.popleft()
            try:
                self._admit(request)
            except Exception as error:  # noqa: BLE001 - logged there
                results.append(refusal(request.request_id, error))
        for request_id in self._cancelled:
            job = self.live.get(request_id)
            if job is not None:
                results.append(self._fail(job, "cancelled", "the request was cancelled"))
            elif self.rescue is not None and self.rescue.holds(request_id):
                self.rescue.cancel(request_id)
        self._cancelled.clear()
        return results

    def _run(self, plan: StepPlan) -> list[Result]:
        """Compute a plan: what the device can continue by itself in a window, the rest at once."""
        windows = self.windows
        division = None if windows is None else windows.divide(plan)
        if windows is not None and division is not None:
            windowed, single = division
            crowded = self.scheduler.has_waiting
            if self._launched(lambda: windows.start(windowed, crowded=crowded, single=single)):
                plan = StepPlan(decodes=single, arrivals=plan.arrivals)
        return self._process(self._forward(plan)) if plan else []

    def _land(self, windows: DecodeWindows) -> list[Result]:
        """Launch the next steps after those in flight, and apply the results of the latter.

        Sequences that the window leaves out get one token beside each window that is launched.
        """
        crowded, single = self.scheduler.has_waiting, windows.left_out(self.scheduler.running)
        follows = not self._disturbed and self._launched(
            lambda: windows.follow(crowded=crowded, single=single)
        )
        results: list[Result] = []
        for moved in self._meter.timed("decode", windows.land()):
            self._meter.windowed(len(moved), windows.slots)
            results += self._process(StepOutput(tokens=moved))
        if follows and (plan := self._plan_beside(windows)):
            results += self._process(self._forward(plan))
        return results

    def _launched(self, launch: Callable[[], int]) -> int:
        """Launch steps on the device and return how many; if that raises, none, and never again."""
        try:
            return launch()
        except Exception:
            logger.exception(GIVEN_UP, extra={"action": "windows_given_up"})
            self._give_windows_up()
            return 0

    def _give_windows_up(self) -> None:
        """Compute step by step from now on, if the device still works."""
        self._require_working_device()
        self.windows = None

    def _schedule(self) -> StepPlan:
        """Build the next step's plan and prepare its cache blocks."""
        self._disturbed = False
        with self._meter.phase("schedule"):
            plan = self.scheduler.schedule()
            plan.arrivals = self._upkeep.prepare(self.scheduler.take_copies())
        return plan

    def _plan_beside(self, windows: DecodeWindows) -> StepPlan:
        """Build the plan of the sequences that a window leaves out, and prepare its blocks."""
        with self._meter.phase("schedule"):
            plan = self.scheduler.decode(windows.left_out(self.scheduler.running))
            self._upkeep.prepare(self.scheduler.take_copies())
        return plan

    def _forward(self, plan: StepPlan) -> StepOutput:
        """Compute the plan; if that raises, compute each request alone, so that only one fails."""
        started = time.perf_counter()
        try:
            with self._meter.phase(self._meter.planned(plan)):
                output = self.executor.run(plan)
        except Exception:
            logger.exception("a step failed; running its requests one by one")
            self._require_working_device()
            return self.executor.run_one_by_one(plan, self._require_working_device)
        if self.tier is not None:
            self.tier.costs.stepped(plan, time.perf_counter() - started)
        return output

    def _require_working_device(self) -> None:
        """Raise where the device itself has failed, and not only a request on it."""
        require_working(self.cache.keys.device)

    def _process(self, output: StepOutput) -> list[Result]:
        """Advance every request by the step's results; return the results of those that end."""
        with self._meter.phase("process"):
            return self._apply(output)

    def _apply(self, output: StepOutput) -> list[Result]:
        self._meter.stepped(output)
        output.record()
        results = self._leave(output)
        for work in output.done:
            if self._is_live(work.job):
                self.scheduler.settle(work)
        moved = [
            (sequence, choice)
            for sequence, choice in output.tokens
            if choice is not None and self._is_live(sequence.job)
        ]
        rankings = [job for job in output.rankings if self._is_live(job)]
        answers: list[Result] = [*self._progress.of_sequences(moved)]
        answers += self._progress.of_rankings(rankings)
        for answer in answers:
            self._drop(self.live[answer.request_id])
        return results + answers

    def _leave(self, output: StepOutput) -> list[Result]:
        """Take out requests that failed or have scores that are not finite; return the failures.

        This comes before anything that they wrote is shared or copied.
        """
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
        """Turn a request into a job in the scheduler's queue.

        Raises:
            RefusedError: The request cannot be computed.
        """
        rescued = self.rescue is not None and self.rescue.holds(request.request_id)
        if request.request_id in self.live or rescued:
            raise RefusedError("duplicate_request", "a request with this id is still running")
        self._enter(self._admission.admit(request, next(self._arrivals)))

    def _enter(self, job: Job) -> None:
        """Put a job into the scheduler's queue."""
        self.live[job.request_id] = job
        self.scheduler.add(job)
        self._disturbed = True

    def _is_live(self, job: Job) -> bool:
        """Whether the request has not ended yet."""
        return self.live.get(job.request_id) is job

    def _not_finite(self, job: Job) -> list[Result]:
        """Compute a request again whose scores are NaN or infinite; return a failure if it ends.

        First it is computed by itself, if another request may be to blame. It may share a block of
        a request whose scores were not known yet. On a GPU, a NaN also reaches earlier rows, where
        attention multiplies it by 0. After that it is computed in a higher precision, if there is
        one.
        """
        if job.is_on_trust:
            self._drop(job, spoiled=True)
            self._enter(self._admission.admit_alone(job))
            return []
        if self.rescue is None:
            return [self._fail(job, "not_finite", NOT_FINITE)]
        logger.warning(
            "request %d: %s; computing it again in a higher precision", job.request_id, NOT_FINITE
        )
        self._meter.recomputes()
        self._drop(job, spoiled=True)
        failure = self.rescue.submit(job.request)
        return [] if failure is None else [failure]

    def _fail(self, job: Job, code: str, message: str) -> RequestFailed:
        """End a request without an answer."""
        self._drop(job, spoiled=True)
        return RequestFailed(job.request_id, code, message)

    def _drop(self, job: Job, *, spoiled: bool = False) -> None:
        """Free the blocks and the slot of a request.

        spoiled: its blocks may hold NaN, so that no other request may share them.
        """
        if spoiled:
            self._disturbed = True
            for table in job.tables:
                self.pool.taint(table.blocks)
        self.scheduler.remove(job)
        del self.live[job.request_id]

    def _second(self, model: Decoder, token_bytes: Sequence[bytes], config: EngineConfig) -> Engine:
        """Make an engine over the same model in a higher precision."""
        again = rescue_config(model, config, self.pool.total)
        return Engine(model, token_bytes, again, tunings=self._tunings)
