"""`client.schedules`: what runs every night, with a transport that blocks."""

from collections.abc import Iterator
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


class Taker(Protocol):
    """A client, as `Schedules` uses it."""

    asking: Asking

    def take(self, steps: Steps[Value]) -> Value:
        """Take the steps of an operation, and return what it returns."""


class Schedules:
    """The tenant's schedules; `named` is a schedule's name or its id.

    To make, change and delete schedules, a key needs the scope `admin`; to pause, resume and run
    them, `submit`. Where the connection breaks a call is tried again, and nothing happens twice.
    """

    def __init__(self, client: Taker) -> None:
        self._client = client

    def list(self) -> Iterator[Schedule]:
        """Yield the schedules with their newest runs, newest first."""
        yield from self._each(operations.schedules(self._client.asking))

    def get(self, named: str) -> Schedule:
        """Return a schedule with its newest run; raises RefusedError where it is unknown."""
        return self._client.take(operations.get(self._client.asking, named))

    def put(self, named: str, **fields: "Unpack[ScheduleOptions]") -> Schedule:
        """Make a schedule of this name, or make the one that is there say this.

        Fields that are left out have their defaults. The same again changes nothing.

        Raises:
            RefusedError: A field is wrong; `param` names it.
        """
        return self._client.take(operations.put(self._client.asking, named, fields))

    def change(self, named: str, **fields: "Unpack[ScheduleOptions]") -> Schedule:
        """Change the fields that are given; None for `keep_results` ends the retention."""
        return self._client.take(operations.change(self._client.asking, named, fields))

    def delete(self, named: str) -> Schedule:
        """Delete a schedule with its history, cancel what it runs, and return what it was."""
        return self._client.take(operations.delete(self._client.asking, named))

    def pause(self, named: str) -> Schedule:
        """Make no more runs; one that has begun goes on."""
        return self._client.take(operations.steer(self._client.asking, named, "pause"))

    def resume(self, named: str) -> Schedule:
        """Let a paused schedule run again, from its next time on."""
        return self._client.take(operations.steer(self._client.asking, named, "resume"))

    def run(self, named: str) -> ScheduleRun:
        """Make a run that begins at once, also of a paused schedule; its next time stays.

        Raises:
            RefusedError: An earlier run goes on, and the schedule would skip this one.
        """
        return self._client.take(operations.run(self._client.asking, named))

    def wait(self, made: ScheduleRun, timeout: float | None = None) -> ScheduleRun:
        """Wait until a run is over, however it ends, and return how it ended.

        Args:
            made: Of `run` or `runs`.
            timeout: Seconds; None means for ever.

        Raises:
            WaitTimeoutError: The run is not over in time; it goes on.
        """
        return self._client.take(operations.wait(self._client.asking, made, timeout))

    def runs(self, named: str) -> Iterator[ScheduleRun]:
        """Yield the runs of a schedule, newest first."""
        yield from self._each(operations.runs(self._client.asking, named))

    def changes(self, schedule_id: str | None = None) -> Iterator[ScheduleChange]:
        """Yield who changed what, newest first; also of schedules that were deleted.

        Args:
            schedule_id: Changes of this schedule alone: its id, not its name.
        """
        yield from self._each(operations.changes(self._client.asking, schedule_id))

    def check(self) -> ScheduleCheck:
        """Return which schedules have failed three times running, or do not run at all."""
        return self._client.take(operations.check(self._client.asking))

    def _each(self, pages: Pages[Item]) -> Iterator[Item]:
        while (found := self._client.take(pages.following())) is not None:
            yield from found
