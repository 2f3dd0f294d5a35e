"""What the API answers about schedules, as typed records; moments are seconds since 1970."""

from dataclasses import dataclass, field, replace

from nightjar.jobs.records import JsonObject
from nightjar.pipeline.client.records import converted, listed, strange


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Rows of a run's job by outcome."""

    total: int
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """One run of a schedule.

    planned_at: The time of the crontab line that it is for.
    begin_at: With the schedule's jitter.
    deadline_at: A run without an end by then fails.
    trigger: "planned", "catch_up" or "manual".
    state: "waiting", "reading", "computing", "writing", "succeeded", "failed", "cancelled" or
        "skipped".
    missed: Planned times before this one at which nothing ran.
    reason: Why it failed, was skipped or is tried again.
    job_id: Its job; None until its rows are read.
    raw: The API's answer.
    """

    id: str
    schedule_id: str
    planned_at: float
    begin_at: float
    deadline_at: float
    trigger: str
    state: str
    missed: int
    attempts: int
    counts: RunCounts
    created_at: float
    reason: str | None = None
    job_id: str | None = None
    started_at: float | None = None
    ended_at: float | None = None
    raw: JsonObject = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, however it ended."""
        return self.ended_at is not None

    @property
    def succeeded(self) -> bool:
        """Whether the run has ended and its answers are where they belong; some rows may fail."""
        return self.state == "succeeded"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule as it was when the API was asked.

    task: A task file in the tenant's folder of the deployment.
    task_of_operator: The operator's command has named the task; its path is not shown.
    file, endpoint, model: In place of a task: an uploaded file, which becomes a batch.
    jitter, deadline, keep_results: Such as "90m" or "7d".
    failures: Runs in a row that failed; from three on, the schedule is `failing`.
    next_at: None if it never runs again, or is paused.
    raw: The API's answer.
    """

    id: str
    name: str
    cron: str
    time_zone: str
    when_still_running: str
    catch_up: bool
    jitter: str
    deadline: str
    priority: int
    paused: bool
    failing: bool
    failures: int
    created_at: float
    changed_at: float
    task: str | None = None
    task_of_operator: bool = False
    file: str | None = None
    endpoint: str | None = None
    model: str | None = None
    keep_results: str | None = None
    next_at: float | None = None
    last_run: ScheduleRun | None = None
    raw: JsonObject = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ScheduleChange:
    """Who changed a schedule, when and what; `before` and `after` hold the fields that differ."""

    id: str
    schedule_id: str
    name: str
    at: float
    actor: str
    action: str
    before: dict[str, str | int | bool | None]
    after: dict[str, str | int | bool | None]
    raw: JsonObject = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ScheduleTrouble:
    """A schedule that fails or stands still, and what is wrong with it."""

    schedule_id: str
    name: str
    trouble: str


@dataclass(frozen=True, slots=True)
class ScheduleCheck:
    """Whether every schedule is well, and what is wrong with those that are not."""

    ok: bool
    troubles: tuple[ScheduleTrouble, ...]
    raw: JsonObject = field(default_factory=dict, repr=False, compare=False)


def read_schedule(answer: JsonObject) -> Schedule:
    """Return the record of a schedule; raises UnreachableError if it is none."""
    last = answer.get("last_run")
    if isinstance(last, dict):
        last = {**last, "raw": last}
    found = converted({**answer, "last_run": last}, Schedule)
    return replace(found, raw=answer)


def read_schedules(answer: JsonObject) -> list[Schedule]:
    """Return the records of a page of schedules."""
    return [read_schedule(one) for one in listed(answer)]


def read_run(answer: JsonObject) -> ScheduleRun:
    """Return the record of a run."""
    return converted(answer, ScheduleRun)


def read_runs(answer: JsonObject) -> list[ScheduleRun]:
    """Return the records of a page of runs."""
    return [read_run(one) for one in listed(answer)]


def read_changes(answer: JsonObject) -> list[ScheduleChange]:
    """Return the records of a page of changes."""
    return [converted(one, ScheduleChange) for one in listed(answer)]


def read_check(answer: JsonObject) -> ScheduleCheck:
    """Return what a check has found."""
    found = tuple(converted(one, ScheduleTrouble) for one in listed(answer))
    if not isinstance(ok := answer.get("ok"), bool):
        raise strange()
    return ScheduleCheck(ok, found, answer)
