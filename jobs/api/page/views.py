"""Jobs as the page shows them: their words, shares, speed, and what can be done with them."""

from dataclasses import dataclass
from datetime import UTC, datetime

from nightjar.jobs.lifecycle import RETRIABLE, RUNNABLE
from nightjar.jobs.records import Job
from nightjar.jobs.states import JobState

# Label, and the class that gives it a colour.
_LABELS = {
    JobState.QUEUED: ("Queued", "wait"),
    JobState.RUNNING: ("Running", "run"),
    JobState.PAUSED: ("Paused", "pause"),
    JobState.COMPLETED: ("Completed", "good"),
    JobState.COMPLETED_WITH_FAILURES: ("With failures", "warn"),
    JobState.FAILED: ("Failed", "bad"),
    JobState.CANCELLING: ("Cancelling", "pause"),
    JobState.CANCELLED: ("Cancelled", "stop"),
    JobState.EXPIRED: ("Expired", "stop"),
}
STATE_GROUPS = {
    "open": (JobState.QUEUED, JobState.RUNNING, JobState.PAUSED, JobState.CANCELLING),
    "queued": (JobState.QUEUED,),
    "running": (JobState.RUNNING,),
    "paused": (JobState.PAUSED,),
    "completed": (JobState.COMPLETED,),
    "failures": (JobState.COMPLETED_WITH_FAILURES, JobState.FAILED),
    "stopped": (JobState.CANCELLING, JobState.CANCELLED, JobState.EXPIRED),
}
GROUP_LABELS = {
    "open": "Open",
    "queued": "Queued",
    "running": "Running",
    "paused": "Paused",
    "completed": "Completed",
    "failures": "With failures",
    "stopped": "Cancelled or expired",
}


@dataclass(frozen=True, slots=True)
class JobView:
    """A job, and its speed in rows a second where it runs."""

    job: Job
    rate: float | None = None

    @property
    def label(self) -> str:
        """Its state in words."""
        return _LABELS[self.job.state][0]

    @property
    def tone(self) -> str:
        """The class of its state's colour."""
        return _LABELS[self.job.state][1]

    @property
    def computed(self) -> int:
        """Rows with an outcome of their own: those that were stopped have none."""
        return self.job.completed + self.job.failed

    @property
    def speed(self) -> float | None:
        """Rows a second, while it runs."""
        return self.rate if self.job.state is JobState.RUNNING else None

    @property
    def is_open(self) -> bool:
        """Whether rows have still to be computed."""
        return not self.job.is_over

    @property
    def left_s(self) -> float | None:
        """Seconds until the last row, at the latest speed; None where nothing moves."""
        return None if self.speed is None else (self.job.total - self.job.ended) / self.speed

    @property
    def took_s(self) -> float | None:
        """Seconds since the first claim, up to the end."""
        started = self.job.started_at
        if started is None:
            return None
        return ((self.job.finished_at or datetime.now(UTC)) - started).total_seconds()

    @property
    def queued_s(self) -> float:
        """Seconds from the submission to the first claim, or until now."""
        until = self.job.started_at or self.job.finished_at or datetime.now(UTC)
        return max(0.0, (until - self.job.created_at).total_seconds())

    @property
    def expires_in_s(self) -> float | None:
        """Seconds to the deadline of an open job."""
        if self.job.expires_at is None or self.job.is_over:
            return None
        return (self.job.expires_at - datetime.now(UTC)).total_seconds()

    @property
    def actions(self) -> tuple[str, ...]:
        """What can be done with it now."""
        state, found = self.job.state, []
        if state in RUNNABLE:
            found.append("pause")
        if state is JobState.PAUSED:
            found.append("resume")
        if state in RETRIABLE and self.job.failed and self.job.purged_at is None:
            found.append("retry")
        if state in RUNNABLE or state is JobState.PAUSED:
            found.append("cancel")
        return tuple(found)
