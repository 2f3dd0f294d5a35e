"""Single calls: each is a job of one row, and its client waits for the row's outcome.

A call goes before all jobs. If its client goes away, or waits for too long, its row is cancelled.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial

from fastapi import Request

from nightjar.jobs.api.body import RefusedRequestError, UploadLimits
from nightjar.jobs.api.call_body import BodyReader, CallBody, busy, parse_call, refused
from nightjar.jobs.api.model_names import ModelNames
from nightjar.jobs.api.watcher import Watcher
from nightjar.jobs.errors import JobError
from nightjar.jobs.records import (
    CallOutcome,
    JsonObject,
    MicroBatchRef,
    NewJob,
    PlannedCall,
    RequestError,
)
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.submission import new_job_id

logger = logging.getLogger(__name__)

PlanCall = Callable[[str, str, RequestKind, JsonObject], PlannedCall | RequestError | None]
"""Called with the job's id, its model, and what it asks for."""

URGENT = 9  # the highest priority that a job can have
# A row expires so long after its client was told that it took too long, if nobody cancelled it.
_EXPIRES_AFTER_S = 30.0
_THREADS = 8
_SHORT_BYTES = 64 * 1024  # a body up to this is parsed without a trip to a thread
_GONE_STATUS = 499


@dataclass(frozen=True, slots=True)
class CallPath:
    """How calls get to the workers.

    plan: Plans a call; gives why it cannot be computed, or None if the planner has to plan it.
    send: Publishes the message of a planned call; raises whatever the broker's client raises.
    """

    plan: PlanCall
    send: Callable[[MicroBatchRef], None]


@dataclass(frozen=True, slots=True)
class CallSettings:
    """How many calls may wait, for how long each, and how they get to the workers.

    path: The quick way; None leaves planning and sending to the planner.
    """

    waiting: int = 256
    timeout_s: float = 600.0
    path: CallPath | None = None


class ClientGoneError(RefusedRequestError):
    """The client went away while it waited."""

    def __init__(self) -> None:
        super().__init__(_GONE_STATUS, "client_gone", "the client went away")


class Call:
    """A call that was submitted; `close` cancels its row unless it has ended."""

    def __init__(self, calls: "Calls", request: Request, asked: CallBody, job_id: str) -> None:
        self.job_id = job_id
        self.asked = asked
        self._calls = calls
        self._ends_at = time.monotonic() + calls.settings.timeout_s
        self._outcome = asyncio.create_task(calls.watcher.wait(job_id))
        self._gone = asyncio.create_task(_until_gone(request))

    async def wait(self, seconds: float | None = None) -> CallOutcome | None:
        """The outcome; None if there is none after so many seconds.

        Raises:
            RefusedRequestError: The time limit of calls has come (504).
            ClientGoneError: The client went away.
        """
        left_s = self._ends_at - time.monotonic()
        tasks = {self._outcome, self._gone}
        wait_s = max(0.0, left_s if seconds is None else min(seconds, left_s))
        await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if self._outcome.done():
            return self._outcome.result()
        if self._gone.done():
            raise ClientGoneError
        if time.monotonic() >= self._ends_at:
            limit_s = self._calls.settings.timeout_s
            message = f"no answer came within {limit_s:g} s, and the request was cancelled"
            raise RefusedRequestError(504, "timeout", message)
        return None

    def close(self) -> None:
        """Free the call's place, and cancel its row unless it has ended."""
        task = self._outcome
        ended = task.done() and not task.cancelled() and task.exception() is None
        task.cancel()
        self._gone.cancel()
        self._calls.leave(self.job_id, ended=ended)


class Calls:
    """Takes calls in, and waits for their outcomes without holding a thread.

    Args:
        store: Where the rows are.
        wake: Tells the planner of a new job's id.
        names: The models that calls may name.
        settings: How many may wait, for how long, and how they get to the workers.
        uploads: How slowly a body may come.
    """

    def __init__(
        self,
        store: Store,
        wake: Callable[[str], None],
        names: ModelNames,
        settings: CallSettings,
        uploads: UploadLimits,
    ) -> None:
        self.settings = settings
        self._store = store
        self._wake = wake
        self._path = settings.path
        self._names = names
        self._bodies = BodyReader(uploads)
        # Not FastAPI's threads, which slow downloads may hold.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="calls")
        self.watcher = Watcher(store.live.ended, self._threads)
        self._taken = 0

    async def begin(self, request: Request, url: str, tenant: str) -> Call:
        """Read, check and submit a call; raises RefusedRequestError or ModelNameError."""
        raw = await self._bodies.read(request)
        loop = asyncio.get_running_loop()
        if len(raw) <= _SHORT_BYTES:
            asked = parse_call(raw, url)
        else:
            asked = await loop.run_in_executor(self._threads, parse_call, raw, url)
        if self._taken >= self.settings.waiting:
            raise busy(f"{self.settings.waiting} calls wait already; send it again later")
        job_id = new_job_id()
        self._taken += 1
        try:
            # A thread of an executor does not know the trace of the call.
            in_context = copy_context().run
            submit = partial(in_context, self._submit, job_id, asked, tenant)
            await asyncio.shield(loop.run_in_executor(self._threads, submit))
        except BaseException as error:
            # The submission of a client that went away goes on, and is cancelled after it.
            self.leave(job_id, ended=not isinstance(error, asyncio.CancelledError))
            raise
        return Call(self, request, asked, job_id)

    def leave(self, job_id: str, *, ended: bool) -> None:
        """Free a place; cancel the row of a call that has not ended."""
        self._taken -= 1
        if not ended:
            self._threads.submit(self._cancel, job_id)

    def _submit(self, job_id: str, asked: CallBody, tenant: str) -> None:
        named = asked.body.get("model")
        model = self._names.recent(named).choose(named)
        planned = None
        if self._path is not None:
            planned = self._path.plan(job_id, model.name, asked.kind, asked.body)
        if isinstance(planned, RequestError):
            raise refused(planned.code, planned.message, planned.param)
        new_job = NewJob(
            model.name,
            completion_window_s=self.settings.timeout_s + _EXPIRES_AFTER_S,
            priority=URGENT,
            tenant=tenant,
            names_model=model.is_named,
        )
        ref = self._store.live.submit(new_job, job_id, asked.kind, asked.body, planned)
        try:
            if ref is not None and self._path is not None:
                self._path.send(ref)
            else:
                self._wake(job_id)
        except Exception:  # whatever the broker's client raises
            logger.warning(
                "a call waits for the broker", exc_info=True, extra={"action": "call_not_sent"}
            )
            if ref is not None:  # the dispatcher sends it when the broker is back
                self._store.planning.requeue([ref])

    def _cancel(self, job_id: str) -> None:
        try:
            self._store.stopping.cancel(job_id)
        except JobError as error:  # it expires by itself
            logger.warning(
                "a call is not cancelled: %s",
                error,
                extra={"action": "call_not_cancelled", "job_id": job_id},
            )


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
