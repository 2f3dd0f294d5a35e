"""The fields of a schedule, as a schedule file and the API give them; checked in one place."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from nightjar.jobs.purge_records import LEAST_KEPT_S, MOST_KEPT_S
from nightjar.jobs.schedule_records import Definition, WhenRunning
from nightjar.jobs.schedules.times import MOST_CHARACTERS, Timetable, zone_of

ID_PREFIX = "sch_"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
TASK_SUFFIXES = (".toml", ".yaml", ".yml")
MOST_JITTER_S = 86_400
MOST_DEADLINE_S = 30 * 86_400
_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_SHOWN_AS = {"task_name": "task", "file_id": "file"}
_RESERVED = ("changes", "check")  # the API has paths of these names
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}

Text = Annotated[str, Field(min_length=1, max_length=255)]
Span = Annotated[str, Field(max_length=10)]
Endpoint = Literal["/v1/completions", "/v1/chat/completions", "/v1/rerank"]


class ScheduleFields(BaseModel):
    """A schedule without its name; `task` or `file` says what is run."""

    model_config = ConfigDict(extra="forbid", strict=True)

    cron: str = Field(
        max_length=MOST_CHARACTERS,
        description="Five fields as in a crontab: minute, hour, day of month, month, day of week.",
        examples=["0 2 * * *"],
    )
    time_zone: str = Field(
        "UTC", max_length=64, description="The zone of these times.", examples=["Asia/Seoul"]
    )
    task: Text | None = Field(None, description="The task file that is run.")
    file: Text | None = Field(None, description="An uploaded file that becomes a batch.")
    endpoint: Endpoint | None = Field(None, description="The endpoint of that batch's lines.")
    model: Text | None = Field(None, description="The model of that batch.")
    when_still_running: WhenRunning = Field(
        WhenRunning.SKIP,
        strict=False,
        description="While an earlier run goes on: `skip` the new one, `queue` it, or `cancel` the "
        "earlier one.",
    )
    catch_up: bool = Field(True, description="Run once when planned times were missed.")
    jitter: Span = Field("0s", description="Begin up to so much later; the same for each run.")
    deadline: Span = Field("24h", description="A run without an end so long after its time fails.")
    priority: int = Field(0, ge=0, le=9, description="Of the jobs that it makes.")
    keep_results: Span | None = Field(
        None, description="Purge requests and results so long after a run."
    )

    @field_validator("cron")
    @classmethod
    def _comes(cls, cron: str) -> str:
        if Timetable(cron).after(datetime.now(UTC)) is None:
            raise ValueError(f"{cron!r} does not come in the next 50 years")
        return cron

    @field_validator("time_zone")
    @classmethod
    def _is_known(cls, name: str) -> str:
        zone_of(name)
        return name

    @field_validator("jitter")
    @classmethod
    def _jitter(cls, text: str) -> str:
        seconds_of(text, 0, MOST_JITTER_S)
        return text

    @field_validator("deadline")
    @classmethod
    def _deadline(cls, text: str) -> str:
        seconds_of(text, 60, MOST_DEADLINE_S)
        return text

    @field_validator("keep_results")
    @classmethod
    def _kept(cls, text: str | None) -> str | None:
        if text is not None:
            seconds_of(text, LEAST_KEPT_S, MOST_KEPT_S)
        return text

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.task is None) == (self.file is None):
            raise ValueError("give exactly one of task and file")
        if self.task is not None:
            given = [name for name in ("endpoint", "model") if getattr(self, name) is not None]
            if given:
                raise ValueError(f"{' and '.join(given)} beside task: the task file says it")
        elif self.endpoint is None:
            raise ValueError("file needs endpoint, such as /v1/completions")
        if seconds_of(self.jitter) >= seconds_of(self.deadline):
            raise ValueError("jitter: must be shorter than the deadline")
        return self

    def definition(self) -> Definition:
        """The checked fields, where `task` is the name of a file in the tenant's folder.

        Raises:
            ValueError: It is not such a name.
        """
        if self.task is not None:
            check_task_name(self.task)
        return self._definition(task_name=self.task)

    def definition_of_operator(self, folder: Path) -> Definition:
        """The checked fields, where `task` is any path, relative to `folder`."""
        path = None if self.task is None else str((folder / Path(self.task).expanduser()).resolve())
        return self._definition(task_path=path)

    def _definition(
        self, *, task_name: str | None = None, task_path: str | None = None
    ) -> Definition:
        kept = self.keep_results
        return Definition(
            cron=" ".join(self.cron.split()),
            time_zone=self.time_zone,
            task_name=task_name,
            task_path=task_path,
            file_id=self.file,
            endpoint=self.endpoint,
            model=self.model,
            when_still_running=self.when_still_running,
            catch_up=self.catch_up,
            jitter_s=seconds_of(self.jitter),
            deadline_s=seconds_of(self.deadline),
            priority=self.priority,
            keep_results_s=None if kept is None else seconds_of(kept),
        )


def changed(definition: Definition, changes: dict[str, Any]) -> Definition:
    """A definition with some fields of the API changed, and checked as a whole.

    A task that the operator's command has named stays, unless `task` or `file` is changed.

    Raises:
        ValidationError: A field is wrong, as pydantic says it.
        ValueError: `task` is not the name of a task file.
    """
    fields: dict[str, Any] = shown_fields(definition.values())
    is_operators = fields.pop("task_of_operator")
    keeps_path = is_operators and not changes.keys() & {"task", "file"}
    if keeps_path:
        fields["task"] = "task.toml"  # stands for it while the others are checked
    elif "task" in changes:
        fields |= {"file": None, "endpoint": None, "model": None}
    elif "file" in changes:
        fields["task"] = None
    found = ScheduleFields.model_validate({**fields, **changes}).definition()
    if keeps_path:
        return replace(found, task_name=None, task_path=definition.task_path)
    return found


Finding = tuple[tuple[str, ...], str]
"""The place of a fault, and what is wrong there."""


def findings(error: ValidationError) -> list[Finding]:
    """What pydantic has found wrong with the fields, without the values that were given."""
    return [_told(dict(one)) for one in error.errors(include_url=False, include_input=False)]


def _told(error: Mapping[str, Any]) -> Finding:
    place = tuple(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(place[-1][:64], ScheduleFields.model_fields, n=1)
        hint = f"did you mean {near[0]}?" if near else "leave it out"
        return place, f"is not a field of a schedule; {hint}"
    if error["type"] == "missing":
        return place, "is missing; give it"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return place, f"{message[:1].lower()}{message[1:]}"


def shown_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Some or all values of a definition, by the names that the API and a schedule file give them.

    The path of a task that the operator's command has named is not shown, but `task_of_operator`.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name == "task_path":
            found["task_of_operator"] = value is not None
        elif name.endswith("_s"):
            found[name.removesuffix("_s")] = None if value is None else shown_span(value)
        else:
            found[_SHOWN_AS.get(name, name)] = value
    return found


def check_task_name(name: str) -> None:
    """Raise ValueError unless it names a task file below a folder, and nothing outside of it."""
    parts = name.split("/")
    if not all(_PART.fullmatch(part) for part in parts) or len(parts) > 8:
        raise ValueError(
            "task: name a file of the task folder, such as nightly/rank.toml, with letters, "
            "digits, '.', '_' and '-'"
        )
    if not name.endswith(TASK_SUFFIXES):
        raise ValueError(f"task: a task file ends with one of {', '.join(TASK_SUFFIXES)}")


def check_name(name: str) -> None:
    """Raise ValueError unless it can be the name of a schedule."""
    if NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name[:80]!r} cannot be a schedule's name: use 1 to 64 letters, digits, '_' and '-'"
        )
    if name in _RESERVED or name.startswith(ID_PREFIX):
        raise ValueError(f"{name!r} is reserved, and no schedule's name: take another one")


def seconds_of(text: str, least_s: int = 0, most_s: int = MOST_KEPT_S) -> int:
    """The seconds of a span such as 90m; raises ValueError."""
    number, unit = text[:-1], _UNITS_S.get(text[-1:])
    if unit is None or not (number.isascii() and number.isdecimal()):
        raise ValueError(f"{text!r} is no span of time: write a number and s, m, h or d, as in 90m")
    seconds = int(number) * unit
    if not least_s <= seconds <= most_s:
        raise ValueError(f"{text!r}: must be from {shown_span(least_s)} to {shown_span(most_s)}")
    return seconds


def shown_span(seconds: int) -> str:
    """A span as people write it: 5400 is 90m."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % _UNITS_S[unit] == 0:
            return f"{seconds // _UNITS_S[unit]}{unit}"
    return f"{seconds}s"
