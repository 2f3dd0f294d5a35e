"""Finds out which of the waiting single calls have ended: one query for all that are due."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.records import CallOutcome

logger = logging.getLogger(__name__)

SOONEST_S = 0.005
LATEST_S = 0.05
AGE_SHARE = 0.05  # a call is asked for again after this share of the time that it has waited
TOGETHER_S = 0.002  # what is due so soon is asked for in the same query
MOST_AT_ONCE = 500
ENDING_GRACE_S = 5.0  # an API process that ends gives up the calls that still wait after so long
_AWAY_S = 0.5  # until the next query after one that failed


@dataclass(slots=True)
class _Waiting:
    ended: asyncio.Future[CallOutcome]
    since: float
    due: float


class Watcher:
    """Waits for single calls; without any, it asks nothing.

    Args:
        ended: Gives the outcomes of those calls that have ended.
        executor: Runs the queries.

    is_ending: Whether this process was told to end.
    """

    def __init__(
        self, ended: Callable[[Collection[str]], list[CallOutcome]], executor: Executor
    ) -> None:
        self.is_ending: Callable[[], bool] = lambda: False
        self._gives_up_at: float | None = None
        self._ended = ended
        self._executor = executor
        self._waiting: dict[str, _Waiting] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def wait(self, job_id: str) -> CallOutcome:
        """The call's outcome; waits until there is one.

        Raises:
            RefusedRequestError: This process ends.
        """
        now = time.monotonic()
        ended = asyncio.get_running_loop().create_future()
        self._waiting[job_id] = _Waiting(ended, now, now + SOONEST_S)
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        try:
            found: CallOutcome = await ended
            return found
        finally:
            self._waiting.pop(job_id, None)

    async def _watch(self) -> None:
        while self._waiting:
            self._changed.clear()
            if self.is_ending():
                self._end()
            soon = time.monotonic() + TOGETHER_S
            due = [job_id for job_id, call in self._waiting.items() if call.due <= soon]
            if due:
                await self._ask(due[:MOST_AT_ONCE])
                continue
            first = min(call.due for call in self._waiting.values())
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, first - time.monotonic())):
                    await self._changed.wait()

    def _end(self) -> None:
        """Give up the waiting calls, once the grace period is over."""
        now = time.monotonic()
        if self._gives_up_at is None:
            self._gives_up_at = now + ENDING_GRACE_S
        if now < self._gives_up_at:
            return
        for call in self._waiting.values():
            if not call.ended.done():
                message = "this API process ends; send the request again"
                refusal = RefusedRequestError(503, "api_ends", message, retry_after_s=1)
                call.ended.set_exception(refusal)

    async def _ask(self, due: list[str]) -> None:
        loop = asyncio.get_running_loop()
        pause_s = 0.0
        try:
            outcomes = await loop.run_in_executor(self._executor, self._ended, due)
        except Exception:
            logger.exception("calls are not watched", extra={"action": "calls_not_watched"})
            outcomes, pause_s = [], _AWAY_S
        for outcome in outcomes:
            call = self._waiting.pop(outcome.job_id, None)
            if call is not None and not call.ended.done():
                call.ended.set_result(outcome)
        now = time.monotonic()
        for job_id in due:
            if (left := self._waiting.get(job_id)) is not None:
                again_s = min(LATEST_S, max(SOONEST_S, AGE_SHARE * (now - left.since)))
                left.due = now + max(again_s, pause_s)
