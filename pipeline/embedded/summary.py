"""How a run goes and how it ended, for whoever shows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nightjar.jobs.records import Job


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended."""

    job: Job
    out: Path
    errors: Path
    was_finished: bool  # an earlier run had done it all
    resumed: int  # requests that had their outcome before this run
    seconds: float
    engine_s: float  # of `seconds`: in steps of the engine
    load_s: float  # of `seconds`: in loading the model
    first_failure: str | None
    precisions: Sequence[str]  # of the answers that were written


class Listener:
    """Hears how the run goes; the command line shows it."""

    def submitted(self, job: Job, *, resumed: bool) -> None:
        """The job is in the store."""

    def progressed(self, job: Job) -> None:
        """Some requests may have ended; called a few times a second."""

    def noticed(self, line: str) -> None:
        """Something that a person should know, such as a restarted process."""
