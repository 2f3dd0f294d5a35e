"""The progress and the summary of a run, for the command line to show."""

from collections.abc import Sequence
from dataclasses import dataclass

from nightjar.jobs.records import Job


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended."""

    job: Job
    out: str  # where the answers are
    errors: str  # where the failures are
    was_finished: bool  # an earlier run had computed everything
    resumed: int  # requests that had an outcome before this run
    seconds: float
    engine_s: float  # of `seconds`: in steps of the engine
    load_s: float  # of `seconds`: in loading the model
    first_failure: str | None
    precisions: Sequence[str]  # of the answers that were written


class Listener:
    """Receives the progress of a run; the command line shows it."""

    def submitted(self, job: Job, *, resumed: bool) -> None:
        """Note that the job is in the store."""

    def progressed(self, job: Job) -> None:
        """Receive the present counts; called a few times a second."""

    def noticed(self, line: str) -> None:
        """Receive a line for the user, such as that a process was restarted."""
