"""What the API answers about schedules, as types; `schedules.py` builds them."""

from typing import Literal

from typing_extensions import TypedDict

from nightjar.jobs.schedule_records import ChangeAction, RunState, Trigger, WhenRunning


class RunCounts(TypedDict):
    """Rows of a run's job by outcome."""

    total: int
    completed: int
    failed: int


class ScheduleRunPayload(TypedDict):
    """A run of a schedule; moments are seconds since 1970.

    `missed` counts planned times before this one at which nothing ran. `reason` says why it failed,
    was skipped or is tried again.
    """

    id: str
    object: Literal["schedule.run"]
    schedule_id: str
    planned_at: float
    begin_at: float
    deadline_at: float
    trigger: Trigger
    state: RunState
    missed: int
    attempts: int
    reason: str | None
    job_id: str | None
    counts: RunCounts
    created_at: float
    started_at: float | None
    ended_at: float | None


class ShownFields(TypedDict):
    """What a schedule says.

    `task_of_operator` tells that the operator's command has named the task; its path is not shown.
    """

    cron: str
    time_zone: str
    task: str | None
    task_of_operator: bool
    file: str | None
    endpoint: str | None
    model: str | None
    when_still_running: WhenRunning
    catch_up: bool
    jitter: str
    deadline: str
    priority: int
    keep_results: str | None


class SchedulePayload(ShownFields):
    """A schedule, with its next time and its newest run; moments are seconds since 1970.

    `failures` counts the runs in a row that failed; from three on, the schedule is `failing`.
    """

    id: str
    object: Literal["schedule"]
    name: str
    paused: bool
    failing: bool
    failures: int
    next_at: float | None
    last_run: ScheduleRunPayload | None
    created_at: float
    changed_at: float


class ScheduleList(TypedDict):
    """A page of schedules, newest first."""

    object: Literal["list"]
    data: list[SchedulePayload]
    has_more: bool
    next_after: str | None


class ScheduleRunList(TypedDict):
    """A page of runs, newest first."""

    object: Literal["list"]
    data: list[ScheduleRunPayload]
    has_more: bool
    next_after: str | None


class DeletedSchedule(TypedDict):
    """A schedule that is gone, with its history."""

    id: str
    object: Literal["schedule"]
    deleted: Literal[True]


class TroublePayload(TypedDict):
    """A schedule that fails or stands still, and what is wrong with it."""

    schedule_id: str
    name: str
    trouble: str


class ScheduleCheck(TypedDict):
    """Whether every schedule is well."""

    object: Literal["schedule.check"]
    ok: bool
    data: list[TroublePayload]


class ScheduleChangePayload(TypedDict):
    """Who changed a schedule, when and what; `before` and `after` hold the fields that differ."""

    id: str
    object: Literal["schedule.change"]
    schedule_id: str
    name: str
    at: float
    actor: str
    action: ChangeAction
    before: dict[str, str | int | bool | None]
    after: dict[str, str | int | bool | None]


class ScheduleChangeList(TypedDict):
    """A page of changes, newest first."""

    object: Literal["list"]
    data: list[ScheduleChangePayload]
    has_more: bool
    next_after: str | None
