"""Schedules: when each runs next, how its last runs went; run now, pause and resume."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Form, Query, Request
from fastapi.responses import RedirectResponse
from starlette.responses import Response

from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.caller import Caller, Reader, Submitter
from nightjar.jobs.api.page import cookies
from nightjar.jobs.api.page.questions import Question, ask, check_form
from nightjar.jobs.api.page.rendering import fragment, page
from nightjar.jobs.api.page.streams import Streams
from nightjar.jobs.errors import LifecycleError
from nightjar.jobs.schedule_records import RunState, Schedule
from nightjar.jobs.schedules.steering import Steering
from nightjar.jobs.store import Store
from nightjar.jobs.store.schedules import MOST_OF_TENANT

RUNS_A_PAGE = 30
LONGEST_ID = 64
_PLACE = f"{cookies.PLACE}/schedules"
Behind = Annotated[str, Query(max_length=LONGEST_ID)]

# Label of a run, and the class that gives it a colour.
RUN_LABELS = {
    RunState.WAITING: ("Waiting", "wait"),
    RunState.READING: ("Reading rows", "run"),
    RunState.COMPUTING: ("Computing", "run"),
    RunState.WRITING: ("Writing answers", "run"),
    RunState.SUCCEEDED: ("Succeeded", "good"),
    RunState.FAILED: ("Failed", "bad"),
    RunState.CANCELLED: ("Cancelled", "stop"),
    RunState.SKIPPED: ("Skipped", "stop"),
}


@dataclass(frozen=True, slots=True)
class ScheduleAction:
    """An act on a schedule: its words, and how it is done."""

    verb: str
    past: str
    question: str
    done: str
    act: Callable[[Steering, str], object]

    def fits(self, schedule: Schedule) -> bool:
        """Whether the schedule can be paused or resumed; it can always run."""
        return {"Pause": not schedule.paused, "Resume": schedule.paused}.get(self.verb, True)


ACTIONS = {
    "run": ScheduleAction(
        "Run now",
        "run",
        "A run begins at once, beside the planned ones. The next planned time stays.",
        "A run was made. It begins as soon as a process takes it.",
        Steering.run_now,
    ),
    "pause": ScheduleAction(
        "Pause",
        "paused",
        "No more runs are made. A run that has begun goes on.",
        "The schedule is paused.",
        Steering.pause,
    ),
    "resume": ScheduleAction(
        "Resume",
        "resumed",
        "Runs are made again from the next planned time on. Times that have passed do not count.",
        "The schedule goes on.",
        Steering.resume,
    ),
}


class SchedulePages:
    """Reads what the pages of schedules show to a caller: those of its tenant."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def all(self, caller: Caller) -> dict[str, Any]:
        """The schedules with their newest runs; a tenant has MOST_OF_TENANT at most."""
        found = self._store.schedules.overview(caller.tenant, MOST_OF_TENANT)
        return {"schedules": found, "labels": RUN_LABELS}

    def one(self, caller: Caller, schedule_id: str, after: str) -> dict[str, Any]:
        """A schedule and a page of its runs, newest first; raises UnknownScheduleError."""
        found = self._store.schedules.get(caller.tenant, schedule_id)
        runs = self._store.schedule_runs.newest(found.id, RUNS_A_PAGE + 1, after or None)
        next_after = runs[RUNS_A_PAGE - 1].id if len(runs) > RUNS_A_PAGE else None
        return {
            "schedule": found,
            "runs": runs[:RUNS_A_PAGE],
            "next_after": next_after,
            "actions": [name for name, one in ACTIONS.items() if one.fits(found)],
            "labels": RUN_LABELS,
        }


def schedule_router(store: Store, streams: Streams) -> APIRouter:
    """The pages of schedules that only read."""
    router, pages = APIRouter(prefix="/schedules"), SchedulePages(store)

    @router.get("")
    def schedules(request: Request, caller: Reader) -> Response:
        return page(request, "schedules.html", **pages.all(caller))

    @router.get("/events")
    def live_schedules(request: Request, caller: Reader) -> Response:
        return streams.answer(
            request,
            lambda: pages.all(caller),
            lambda seen: fragment("_schedules.html", **seen),
        )

    @router.get("/{schedule_id}")
    def schedule(
        request: Request, schedule_id: str, caller: Reader, after: Behind = "", done: str = ""
    ) -> Response:
        found = pages.one(caller, _checked(schedule_id), _checked(after))
        notice = ACTIONS[done].done if done in ACTIONS else None
        values: dict[str, Any] = {"notice": notice, "all_actions": ACTIONS, "after_here": after}
        return page(request, "schedule.html", **found, **values)

    @router.get("/{schedule_id}/events")
    def live_schedule(
        request: Request, schedule_id: str, caller: Reader, after: Behind = ""
    ) -> Response:
        of, behind = _checked(schedule_id), _checked(after)
        store.schedules.get(caller.tenant, of)  # refused here, and not within a stream
        return streams.answer(
            request,
            lambda: pages.one(caller, of, behind),
            lambda seen: fragment("_schedule.html", **seen),
        )

    return router


def schedule_acting_router(store: Store) -> APIRouter:
    """What can be done with a schedule: first a question, then the act."""
    router = APIRouter(prefix="/schedules/{schedule_id}")

    @router.get("/confirm/{action}")
    def confirm(request: Request, schedule_id: str, action: str, caller: Submitter) -> Response:
        """Ask whether it shall be done."""
        found = store.schedules.get(caller.tenant, _checked(schedule_id))
        asked = _possible(action, found)
        return ask(
            request,
            Question(
                title="Run this schedule now?"
                if action == "run"
                else f"{asked.verb} this schedule?",
                name=found.name,
                text=asked.question,
                button=asked.verb,
                thing=f"{_PLACE}/{found.id}",
                action=action,
            ),
        )

    @router.post("/{action}")
    def do(
        request: Request,
        schedule_id: str,
        action: str,
        caller: Submitter,
        token: Annotated[str, Form(max_length=200)] = "",
    ) -> Response:
        """Do it, and show the schedule again."""
        check_form(request, token)
        found = store.schedules.get(caller.tenant, _checked(schedule_id))
        asked = _possible(action, found)
        asked.act(Steering(store, caller.tenant, caller.actor), found.id)
        return RedirectResponse(f"{_PLACE}/{found.id}?done={action}", 303)

    return router


def _checked(id_: str) -> str:
    """The id; what no database can hold becomes one that nothing has."""
    return id_[:LONGEST_ID].replace("\0", "�")


def _possible(action: str, schedule: Schedule) -> ScheduleAction:
    asked = ACTIONS.get(action)
    if asked is None:
        raise RefusedRequestError(404, "unknown_action", "there is no such action")
    if not asked.fits(schedule):
        state = "paused" if schedule.paused else "not paused"
        raise LifecycleError(f"the schedule is {state}: it cannot be {asked.past} now")
    return asked
