"""Shows how a job goes on: a bar on a terminal, a line every ten seconds elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from nightjar.pipeline.client.records import JobStatus

_LINE_EVERY_S = 10.0


@contextmanager
def shown(
    progress: bool | Callable[[JobStatus], object],
) -> Iterator[Callable[[JobStatus], object]]:
    """Give what is told of each status: the caller's function, a bar on standard error, or none."""
    if callable(progress):
        yield progress
    elif progress:
        console = Console(stderr=True, soft_wrap=True)
        with _bar(console) as bar:
            yield _Shown(console, bar).tell
    else:
        yield lambda _: None


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class _Shown:
    def __init__(self, console: Console, bar: Progress) -> None:
        self._console = console
        self._bar = bar
        self._task = bar.add_task("queued", total=None)
        self._line_at = time.monotonic()

    def tell(self, status: JobStatus) -> None:
        """Show a status."""
        doing = f"{status.state}, waits: {status.waiting}" if status.waiting else status.state
        self._bar.update(
            self._task, description=doing, total=status.counts.total, completed=status.ended
        )
        now = time.monotonic()
        if not self._console.is_terminal and now - self._line_at >= _LINE_EVERY_S:
            self._line_at = now
            line = f"{status.ended} of {status.counts.total} rows, {doing}"
            self._console.print(line, highlight=False, markup=False)
