"""What a run computes, and where its answers go: a file of batch lines, or a task."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.records import Job, NewRequest, RejectedRow, ResultRecord
from nightjar.jobs.store import Store


class RunError(Exception):
    """The run cannot continue now; landed results are kept, and the same command resumes it."""


class Work(Protocol):
    """The input and the output of one run."""

    @property
    def name(self) -> str:
        """What is read, for messages."""

    @property
    def units(self) -> str:
        """What it consists of: lines or rows."""

    @property
    def results(self) -> str:
        """Where the answers go, for the summary."""

    @property
    def failures(self) -> str:
        """Where the failures go, for the summary."""

    @property
    def starts_anew(self) -> bool:
        """Whether the same command computes an input that has changed since its answers landed.

        Otherwise a work directory is for one input.
        """

    @property
    def is_fixed(self) -> bool:
        """Whether the same identity means the same rows."""

    @property
    def workdir(self) -> Path:
        """Where the state of the run is kept, unless the user names another place."""

    def check(self, workdir: Path, *, overwrite: bool) -> None:
        """Check what can be checked before the model is opened.

        Raises:
            UsageError: The input cannot be read, or the output cannot be written.
        """

    def prepare(self, model: ModelDirectory) -> None:
        """Check what needs the model; raises UsageError."""

    def identity(self) -> Mapping[str, str]:
        """Return what decides about the rows, by names that the user knows."""

    def rows(self, most_bad_in_a_row: int) -> Iterable[NewRequest | RejectedRow]:
        """Read the input from its beginning.

        Raises:
            UsageError: It cannot be read on.
            RunError: It cannot be read on now.
        """

    def write(self, store: Store, job: Job, workdir: Path, *, overwrite: bool) -> set[str]:
        """Write the results of the job; return the precisions that they were computed in.

        Raises:
            RunError: They cannot be written.
        """

    def was_written(self, workdir: Path, job: Job) -> bool:
        """Whether an earlier run has written the results of this job, and they are still there."""


def noting_precisions(
    results: Iterable[ResultRecord], precisions: set[str]
) -> Iterator[ResultRecord]:
    """Yield the results, and note the precisions that they were computed in."""
    for result in results:
        if result.body is not None and "precision" in result.body:
            precisions.add(result.body["precision"])
        yield result
