"""The typed records of retention: what may be purged, and what was."""

from dataclasses import dataclass
from datetime import datetime

LEAST_KEPT_S = 3_600
"""The shortest retention: a client needs time to fetch what it has asked for."""

MOST_KEPT_S = 36_500 * 86_400


@dataclass(frozen=True, slots=True)
class PurgeScope:
    """Which jobs a purge takes, of those that are over; filled by the sweeper or the command.

    Without `older_than_s` and without `job_id` it takes the jobs whose time is over.
    """

    keep_s: float | None = None  # the deployment's; None: for ever
    older_than_s: float | None = None  # since the end of a job, whatever its retention is
    tenant: str | None = None  # only the jobs of this one
    job_id: str | None = None  # only this one, whatever its age
    only_exported: bool = False  # not of a job that is named

    @property
    def is_of_settings(self) -> bool:
        """Whether it takes the jobs whose time is over, and nobody waits for it."""
        return self.older_than_s is None and self.job_id is None


@dataclass(frozen=True, slots=True)
class ExpendableJob:
    """A job that may be purged; filled by the store."""

    id: str
    tenant: str
    rows: int
    finished_at: datetime
    takes_input: bool  # the uploaded file of a batch goes as well


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """What a purge did so far."""

    jobs: int = 0  # that nobody can read from now on
    rows: int = 0  # requests that were deleted, with their results
    is_done: bool = True  # nothing is left that could be deleted now
