"""The operations on schedules as steps: make, change, steer, run and watch them."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from io import BytesIO
from itertools import count
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from nightjar.pipeline.client.errors import (
    ClientError,
    RefusedError,
    RequestError,
    UnreachableError,
)
from nightjar.pipeline.client.pages import Pages
from nightjar.pipeline.client.polling import until_over
from nightjar.pipeline.client.schedule_records import (
    Schedule,
    ScheduleChange,
    ScheduleCheck,
    ScheduleRun,
    read_changes,
    read_check,
    read_run,
    read_runs,
    read_schedule,
    read_schedules,
)
from nightjar.pipeline.client.steps import PASSING, Asking, Call, Pause, Steps, back_off_s
from nightjar.pipeline.client.uploads import Upload

SCHEDULES = "/v1/schedules"
_JSON = {"Content-Type": "application/json"}
_UNKNOWN = "unknown_schedule"


def get(asking: Asking, named: str) -> Steps[Schedule]:
    """Ask how a schedule stands."""
    return read_schedule((yield from asking.ask(Call("GET", _path(named)))))


def put(asking: Asking, named: str, fields: Mapping[str, Any]) -> Steps[Schedule]:
    """Make a schedule, or make the one that is there say this."""
    given = {name: value for name, value in fields.items() if value is not None}
    return (yield from _sent(asking, "PUT", named, given))


def change(asking: Asking, named: str, fields: Mapping[str, Any]) -> Steps[Schedule]:
    """Change the fields that are given; the others stay."""
    return (yield from _sent(asking, "PATCH", named, fields))


def _sent(asking: Asking, method: str, named: str, fields: Mapping[str, Any]) -> Steps[Schedule]:
    try:
        body = msgspec.json.encode(dict(fields))
    except TypeError as error:
        raise RequestError(f"a field of the schedule cannot be sent: {error}") from error
    call = Call(method, _path(named), headers=_JSON, upload=Upload(BytesIO(body)))
    return read_schedule((yield from asking.ask(call)))


def delete(asking: Asking, named: str) -> Steps[Schedule]:
    """Delete a schedule, and return what it was."""
    found = yield from get(asking, named)
    try:
        yield from asking.ask(Call("DELETE", _path(found.id)))
    except RefusedError as error:
        if error.code != _UNKNOWN:  # else a try whose answer was lost has deleted it
            raise
    return found


def steer(asking: Asking, named: str, action: Literal["pause", "resume"]) -> Steps[Schedule]:
    """Pause a schedule, or let it go on."""
    return read_schedule((yield from asking.ask(Call("POST", f"{_path(named)}/{action}"))))


def run(asking: Asking, named: str) -> Steps[ScheduleRun]:
    """Make a run that begins at once.

    Sent twice, the call could make two runs. So after a broken connection the history says first
    whether the run was made.
    """
    known = {one.id for one in (yield from _newest(asking, named))}
    once, call = replace(asking, retries=0), Call("POST", f"{_path(named)}/run")
    for tried in count():
        try:
            return read_run((yield from once.ask(call)))
        except (UnreachableError, RefusedError) as error:
            is_passing = not isinstance(error, RefusedError) or error.status in PASSING
            if not is_passing or tried == asking.retries:
                raise
        yield Pause(back_off_s(tried))
        for one in (yield from _newest(asking, named)):
            if one.id not in known and one.trigger == "manual":
                return one
    raise AssertionError  # `count` has no end


def _newest(asking: Asking, named: str) -> Steps[list[ScheduleRun]]:
    return (yield from runs(asking, named).following()) or []


def wait(asking: Asking, made: ScheduleRun, timeout_s: float | None) -> Steps[ScheduleRun]:
    """Ask for a run until it is over."""

    def late(found: ScheduleRun) -> str:
        return f"the run {found.id!r} is {found.state} after {timeout_s} s"

    ask = partial(_again, asking, made)
    return (yield from until_over(ask, timeout_s, lambda found: None, late))


def _again(asking: Asking, made: ScheduleRun) -> Steps[ScheduleRun]:
    pages = runs(asking, made.schedule_id)
    while (page := (yield from pages.following())) is not None:
        for one in page:
            if one.id == made.id:
                return one
    raise ClientError(f"the run {made.id!r} is no longer in the history of its schedule")


def check(asking: Asking) -> Steps[ScheduleCheck]:
    """Ask which schedules fail or stand still."""
    return read_check((yield from asking.ask(Call("GET", f"{SCHEDULES}/check"))))


def schedules(asking: Asking) -> Pages[Schedule]:
    """The tenant's schedules, newest first."""
    return Pages(asking, SCHEDULES, read_schedules)


def runs(asking: Asking, named: str) -> Pages[ScheduleRun]:
    """The runs of a schedule, newest first."""
    return Pages(asking, f"{_path(named)}/runs", read_runs)


def changes(asking: Asking, schedule_id: str | None) -> Pages[ScheduleChange]:
    """Who changed what, newest first; of one schedule, or of all."""
    query = {} if schedule_id is None else {"schedule_id": schedule_id}
    return Pages(asking, f"{SCHEDULES}/changes", read_changes, query)


def _path(named: str) -> str:
    if not named:
        raise RequestError("the name of a schedule is empty")
    return f"{SCHEDULES}/{quote(named, safe='')}"
