"""The typed records of schedules: what runs when, its runs, and who changed what."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum

from nightjar.jobs.records import DEFAULT_TENANT

FAILING_AFTER = 3
"""A schedule whose last so many runs failed is failing: an event and a command say so."""

LATE_S = 300.0
"""A run that begins so long after its planned time was missed, and is caught up or left out."""


class WhenRunning(StrEnum):
    """What happens at a planned time while an earlier run of the schedule goes on."""

    SKIP = "skip"  # the new run is left out
    QUEUE = "queue"  # it waits for the earlier one; at most one waits
    CANCEL = "cancel"  # the earlier one is cancelled


class Trigger(StrEnum):
    """Why a run was made."""

    PLANNED = "planned"
    CATCH_UP = "catch_up"  # its time was missed, as no planner was there
    MANUAL = "manual"  # somebody asked for it


class RunState(StrEnum):
    """Where a run stands."""

    WAITING = "waiting"  # for its jitter, an earlier run, or a process that takes it
    READING = "reading"  # its rows are read, and become a job
    COMPUTING = "computing"  # its job is in the deployment
    WRITING = "writing"  # its answers are written into the sink
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"  # nothing of it was begun


class ChangeAction(StrEnum):
    """What was done to a schedule."""

    CREATED = "created"
    UPDATED = "updated"
    PAUSED = "paused"
    RESUMED = "resumed"
    RUN_NOW = "run_now"
    TASK_CHANGED = "task_changed"  # a run found its task file changed since the last one
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Definition:
    """What a schedule says; filled from a file or the API, and checked (jobs/schedules/fields.py).

    Exactly one of task_name, task_path and file_id is given.
    """

    cron: str  # five fields, as in a crontab
    time_zone: str = "UTC"
    task_name: str | None = None  # a task file in the tenant's folder of NIGHTJAR_TASK_FOLDER
    task_path: str | None = None  # a task file anywhere; given by the operator's command alone
    file_id: str | None = None  # an uploaded file, which becomes a batch
    endpoint: str | None = None  # of that batch
    model: str | None = None  # of that batch
    when_still_running: WhenRunning = WhenRunning.SKIP
    catch_up: bool = True
    jitter_s: int = 0
    deadline_s: int = 86_400
    priority: int = 0
    keep_results_s: int | None = None

    def values(self) -> dict[str, object]:
        """The fields as plain values, for SQL and for the record of changes."""
        return {**asdict(self), "when_still_running": self.when_still_running.value}


@dataclass(frozen=True, slots=True)
class NewSchedule:
    """A schedule to be made; `source` is the schedule file that it comes from."""

    name: str
    definition: Definition
    tenant: str = DEFAULT_TENANT
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule as stored."""

    id: str
    tenant: str
    name: str
    definition: Definition
    source: str | None
    paused: bool
    next_at: datetime | None  # None: it never runs again
    failures: int  # runs in a row that failed
    task_digest: str | None  # SHA-256 of its task file as the last run found it
    created_at: datetime
    changed_at: datetime

    @property
    def is_failing(self) -> bool:
        """Whether its last runs have all failed."""
        return self.failures >= FAILING_AFTER


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """One run of a schedule; counts are those of its job's rows."""

    id: str
    schedule_id: str
    tenant: str
    planned_at: datetime
    begin_at: datetime  # with its jitter
    deadline_at: datetime
    trigger: Trigger
    state: RunState
    missed: int  # planned times before this one at which nothing ran
    attempts: int
    reason: str | None  # why it failed, was skipped or is tried again
    job_id: str | None
    total: int
    completed: int
    failed: int
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class ScheduleOverview:
    """A schedule with its newest run, for lists and pages."""

    schedule: Schedule
    last_run: ScheduleRun | None


@dataclass(frozen=True, slots=True)
class Firing:
    """A planned time that has come; filled by the planner."""

    schedule: Schedule
    planned_at: datetime
    next_at: datetime | None
    missed: int
    trigger: Trigger
    jitter_s: float = 0.0
    skip_reason: str | None = None  # it was missed, and the schedule catches nothing up


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """A step of a run that one process takes; `epoch` fences what it writes."""

    run: ScheduleRun
    definition: Definition
    schedule_name: str
    task_digest: str | None
    task: str | None  # the task as it was when the rows were read, as JSON
    epoch: int


@dataclass(frozen=True, slots=True)
class HeldRun:
    """A claim of a process, as others see it: a counter that rises while the process lives."""

    run_id: str
    owner: str
    epoch: int
    beats: int


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ends."""

    state: RunState
    reason: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class ScheduleChange:
    """Who changed a schedule, when and what; `before` and `after` hold the fields that differ."""

    id: str
    schedule_id: str
    tenant: str
    name: str
    at: datetime
    actor: str
    action: ChangeAction
    before: Mapping[str, object]
    after: Mapping[str, object]
