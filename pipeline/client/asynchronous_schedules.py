"""`client.schedules` of `AsyncClient`: the same operations, with a transport of asyncio."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Protocol

from nightjar.pipeline.client import schedule_operations as operations
from nightjar.pipeline.client.options import ScheduleOptions
from nightjar.pipeline.client.pages import Item, Pages
from nightjar.pipeline.client.schedule_records import (
    Schedule,
    ScheduleChange,
    ScheduleCheck,
    ScheduleRun,
)
from nightjar.pipeline.client.steps import Asking, Steps, Value

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncTaker(Protocol):
    """A client, as `AsyncSchedules` uses it."""

    asking: Asking

    async def take(self, steps: Steps[Value]) -> Value:
        """Take the steps of an operation, and return what it returns."""


class AsyncSchedules:
    """The tenant's schedules, in asyncio; `Schedules` says what each method does."""

    def __init__(self, client: AsyncTaker) -> None:
        self._client = client

    async def list(self) -> AsyncIterator[Schedule]:
        """Yield the schedules with their newest runs, newest first."""
        async for one in self._each(operations.schedules(self._client.asking)):
            yield one

    async def get(self, named: str) -> Schedule:
        """Return a schedule with its newest run; raises RefusedError where it is unknown."""
        return await self._client.take(operations.get(self._client.asking, named))

    async def put(self, named: str, **fields: "Unpack[ScheduleOptions]") -> Schedule:
        """Make a schedule of this name, or make the one that is there say this."""
        return await self._client.take(operations.put(self._client.asking, named, fields))

    async def change(self, named: str, **fields: "Unpack[ScheduleOptions]") -> Schedule:
        """Change the fields that are given; None for `keep_results` ends the retention."""
        return await self._client.take(operations.change(self._client.asking, named, fields))

    async def delete(self, named: str) -> Schedule:
        """Delete a schedule with its history, cancel what it runs, and return what it was."""
        return await self._client.take(operations.delete(self._client.asking, named))

    async def pause(self, named: str) -> Schedule:
        """Make no more runs; one that has begun goes on."""
        return await self._client.take(operations.steer(self._client.asking, named, "pause"))

    async def resume(self, named: str) -> Schedule:
        """Let a paused schedule run again, from its next time on."""
        return await self._client.take(operations.steer(self._client.asking, named, "resume"))

    async def run(self, named: str) -> ScheduleRun:
        """Make a run that begins at once, also of a paused schedule; its next time stays."""
        return await self._client.take(operations.run(self._client.asking, named))

    async def wait(self, made: ScheduleRun, timeout: float | None = None) -> ScheduleRun:
        """Wait until a run is over, however it ends; raises WaitTimeoutError."""
        return await self._client.take(operations.wait(self._client.asking, made, timeout))

    async def runs(self, named: str) -> AsyncIterator[ScheduleRun]:
        """Yield the runs of a schedule, newest first."""
        async for one in self._each(operations.runs(self._client.asking, named)):
            yield one

    async def changes(self, schedule_id: str | None = None) -> AsyncIterator[ScheduleChange]:
        """Yield who changed what, newest first; also of schedules that were deleted."""
        async for one in self._each(operations.changes(self._client.asking, schedule_id)):
            yield one

    async def check(self) -> ScheduleCheck:
        """Return which schedules have failed three times running, or do not run at all."""
        return await self._client.take(operations.check(self._client.asking))

    async def _each(self, pages: Pages[Item]) -> AsyncIterator[Item]:
        while (found := await self._client.take(pages.following())) is not None:
            for one in found:
                yield one
