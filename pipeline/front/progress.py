"""Shows a job's progress on standard error: bar, rate and time left."""

import time
from collections.abc import Callable

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

from nightjar.jobs.records import Job
from nightjar.pipeline.embedded.summary import Listener, RunSummary

_LINE_EVERY_S = 10.0


class ProgressView(Listener):
    """Shows a bar on a terminal, and a line every ten seconds elsewhere.

    before_each: Called before progress is shown; what it raises ends the run.
    """

    def __init__(self, console: Console, before_each: Callable[[], None] | None = None) -> None:
        self._console = console
        self._before_each = before_each
        self._started = time.monotonic()
        self._line_at = self._started
        self._done_before = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("computing", total=None, rate="")

    def __enter__(self) -> "ProgressView":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def submitted(self, job: Job, *, resumed: bool) -> None:
        """Show the size of the job and how much is done already."""
        self._done_before = job.ended
        if resumed and not job.is_over:
            self.noticed(f"continuing: {job.ended} of {job.total} requests are already done")
        self._progress.update(self._bar, total=job.total, completed=job.ended)

    def progressed(self, job: Job) -> None:
        """Move the bar."""
        if self._before_each is not None:
            self._before_each()
        now = time.monotonic()
        rate = (job.ended - self._done_before) / max(now - self._started, 1e-9)
        self._progress.update(self._bar, completed=job.ended, rate=f"{rate:.1f} requests/s")
        if not self._console.is_terminal and now - self._line_at >= _LINE_EVERY_S:
            self._line_at = now
            self.noticed(f"{job.ended} of {job.total} requests, {rate:.1f} requests/s")

    def noticed(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(line, highlight=False, markup=False)


def print_summary(console: Console, summary: RunSummary) -> None:
    """Print what the run did, where its time went, what early stops saved, and the result files."""
    job = summary.job

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    if summary.was_finished:
        say(f"already finished: nothing to do; the results are in {summary.out}")
        return
    computed = job.total - summary.resumed
    say(
        f"{computed} requests in {summary.seconds:.1f} s ({computed / summary.seconds:.1f}/s, "
        f"start-up included): {job.completed} succeeded, {job.failed + job.cancelled} failed"
    )
    if summary.engine_s:
        else_s = summary.seconds - summary.engine_s - summary.load_s
        say(
            f"time: {summary.engine_s:.2f} s in the engine, {summary.load_s:.2f} s loading the "
            f"model, {else_s:.2f} s else"
        )
    if summary.precisions:
        say(f"precision: {', '.join(summary.precisions)}")
    if job.reused:
        say(
            f"{job.reused} answers were shared with equal requests: {job.reused_tokens} tokens "
            "not computed again"
        )
    if job.requested_tokens:
        say(
            f"the answers hold {job.completion_tokens} of {job.requested_tokens} requested tokens: "
            f"{job.saved_tokens} saved by early stop"
        )
    say(f"results: {summary.out}")
    if job.failed or job.cancelled:
        say(f"failures: {summary.errors}")
        if summary.first_failure is not None and job.completed:
            say(f"the first: {summary.first_failure}")
