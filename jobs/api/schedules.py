"""Schedules over HTTP: what runs when, its runs, who changed what, and what fails."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from nightjar.jobs.api import schedule_examples as examples
from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.caller import Administrator, Caller, Reader, Submitter
from nightjar.jobs.api.documenting import ScheduleName, documented
from nightjar.jobs.api.files import checked_file_id
from nightjar.jobs.api.model_names import ModelNames
from nightjar.jobs.api.request_bodies import (
    ScheduleChange,
    body_documented,
    invalid_body,
    json_body,
)
from nightjar.jobs.api.results import is_id
from nightjar.jobs.api.schedule_payloads import change_payload, run_payload, schedule_payload
from nightjar.jobs.api.schedule_schemas import (
    DeletedSchedule,
    ScheduleChangeList,
    ScheduleCheck,
    ScheduleList,
    SchedulePayload,
    ScheduleRunList,
    ScheduleRunPayload,
)
from nightjar.jobs.errors import UnknownFileError, UnknownScheduleError
from nightjar.jobs.file_records import FilePurpose
from nightjar.jobs.schedule_records import Definition, Schedule
from nightjar.jobs.schedules.checking import troubles
from nightjar.jobs.schedules.fields import ID_PREFIX, ScheduleFields, changed, findings
from nightjar.jobs.schedules.steering import Steering
from nightjar.jobs.store import Store

MAX_PAGE = 100

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
After = Annotated[str | None, Query(description="The last id of the page before.")]
OfOne = Annotated[str | None, Query(description="Changes of this schedule alone: its id.")]
Whole = Annotated[ScheduleFields, Depends(json_body(ScheduleFields, findings))]
Partial = Annotated[BaseModel, Depends(json_body(ScheduleChange, findings))]


def schedules_router(store: Store, names: ModelNames) -> APIRouter:
    """Shows, makes, changes and deletes schedules."""
    router = APIRouter(prefix="/v1/schedules/{schedule}", tags=["schedules"])

    @router.get("", response_model=SchedulePayload, responses=documented(examples.SCHEDULE, 404))
    def show_schedule(caller: Reader, schedule: ScheduleName) -> JSONResponse:
        """One schedule, with its newest run."""
        return _told(store, store.schedules.find(caller.tenant, _named(schedule)))

    @router.put(
        "",
        status_code=201,
        response_model=SchedulePayload,
        responses=documented(
            examples.SCHEDULE, 400, 404, 408, 409, 413, 415, status=201, again=SchedulePayload
        ),
        openapi_extra=body_documented(ScheduleFields, examples.FIELDS),
    )
    def put_schedule(caller: Administrator, schedule: ScheduleName, body: Whole) -> JSONResponse:
        """Make a schedule of this name, or make the one that is there say this.

        `task` names a file in the tenant's folder of NIGHTJAR_TASK_FOLDER.
        """
        named = _named(schedule)
        if named.startswith(ID_PREFIX):  # an id names a schedule that is there
            store.schedules.find(caller.tenant, named)
        definition = _usable(store, names, caller, _definition(body))
        try:
            put = _steering(store, caller).put(named, definition)
        except ValueError as error:
            message = f"schedule: {error}"
            raise RefusedRequestError(400, "invalid_name", message, "schedule") from None
        return _told(store, put.schedule, 201 if put.change == "created" else 200)

    @router.patch(
        "",
        response_model=SchedulePayload,
        responses=documented(examples.SCHEDULE, 400, 404, 408, 413, 415),
        openapi_extra=body_documented(ScheduleChange, examples.CHANGE),
    )
    def change_schedule(
        caller: Administrator, schedule: ScheduleName, body: Partial
    ) -> JSONResponse:
        """Change some fields of a schedule; the others stay."""
        steering = _steering(store, caller)
        seen = steering.find(_named(schedule))
        definition = _changed(seen.definition, body.model_dump(exclude_unset=True))
        return _told(store, steering.change(seen, _usable(store, names, caller, definition)))

    @router.delete("", response_model=DeletedSchedule, responses=documented(examples.DELETED, 404))
    def delete_schedule(caller: Administrator, schedule: ScheduleName) -> JSONResponse:
        """Delete a schedule with its history, and cancel what it runs."""
        found = _steering(store, caller).delete(_named(schedule))
        gone: DeletedSchedule = {"id": found.id, "object": "schedule", "deleted": True}
        return JSONResponse(gone)

    return router


def acting_router(store: Store) -> APIRouter:
    """Pauses, resumes and runs schedules."""
    router = APIRouter(prefix="/v1/schedules/{schedule}", tags=["schedules"])

    @router.post(
        "/pause", response_model=SchedulePayload, responses=documented(examples.SCHEDULE, 404)
    )
    def pause_schedule(caller: Submitter, schedule: ScheduleName) -> JSONResponse:
        """Make no more runs; one that has begun goes on."""
        return _told(store, _steering(store, caller).pause(_named(schedule)))

    @router.post(
        "/resume", response_model=SchedulePayload, responses=documented(examples.SCHEDULE, 404)
    )
    def resume_schedule(caller: Submitter, schedule: ScheduleName) -> JSONResponse:
        """Let a paused schedule run again, from its next time on."""
        return _told(store, _steering(store, caller).resume(_named(schedule)))

    @router.post(
        "/run",
        status_code=201,
        response_model=ScheduleRunPayload,
        responses=documented(examples.RUN, 404, 409, status=201),
    )
    def run_schedule(caller: Submitter, schedule: ScheduleName) -> JSONResponse:
        """Make a run that begins at once, also of a paused schedule; its next time stays."""
        made = _steering(store, caller).run_now(_named(schedule))
        return JSONResponse(run_payload(made), status_code=201)

    return router


def watching_router(store: Store) -> APIRouter:
    """Lists schedules, their runs and changes, and tells which of them fail."""
    router = APIRouter(prefix="/v1/schedules", tags=["schedules"])

    @router.get("", response_model=ScheduleList, responses=documented(examples.SCHEDULE_LIST, 400))
    def list_schedules(caller: Reader, limit: Limit = 20, after: After = None) -> JSONResponse:
        """Schedules with their newest runs, newest first."""
        found = store.schedules.overview(caller.tenant, limit + 1, _after(after, ID_PREFIX))
        data = [schedule_payload(one.schedule, one.last_run) for one in found[:limit]]
        return _page(data, has_more=len(found) > limit)

    @router.get("/check", response_model=ScheduleCheck, responses=documented(examples.CHECK))
    def check_schedules(caller: Reader) -> JSONResponse:
        """Which schedules have failed three times running, or do not run at all."""
        found = troubles(store, caller.tenant)
        told: ScheduleCheck = {
            "object": "schedule.check",
            "ok": not found,
            "data": [
                {"schedule_id": one.schedule.id, "name": one.schedule.name, "trouble": one.told}
                for one in found
            ],
        }
        return JSONResponse(told)

    @router.get(
        "/changes",
        response_model=ScheduleChangeList,
        responses=documented(examples.CHANGE_LIST, 400),
    )
    def list_changes(
        caller: Reader, limit: Limit = 20, after: After = None, schedule_id: OfOne = None
    ) -> JSONResponse:
        """Who changed which schedule, newest first; also of schedules that were deleted."""
        behind, one = _after(after, "chg_"), _after(schedule_id, ID_PREFIX, "schedule_id")
        found = store.schedules.changes(caller.tenant, limit + 1, behind, one)
        return _page([change_payload(each) for each in found[:limit]], has_more=len(found) > limit)

    @router.get(
        "/{schedule}/runs",
        response_model=ScheduleRunList,
        responses=documented(examples.RUN_LIST, 400, 404),
    )
    def list_runs(
        caller: Reader, schedule: ScheduleName, limit: Limit = 20, after: After = None
    ) -> JSONResponse:
        """Runs of a schedule, newest first."""
        own = store.schedules.find(caller.tenant, _named(schedule))
        found = store.schedule_runs.newest(own.id, limit + 1, _after(after, "run_"))
        return _page([run_payload(run) for run in found[:limit]], has_more=len(found) > limit)

    return router


def _steering(store: Store, caller: Caller) -> Steering:
    return Steering(store, caller.tenant, caller.actor)


def _told(store: Store, found: Schedule, status: int = 200) -> JSONResponse:
    last = store.schedule_runs.newest(found.id, 1)
    return JSONResponse(schedule_payload(found, last[0] if last else None), status_code=status)


def _page(data: list[Any], *, has_more: bool) -> JSONResponse:
    last = data[-1]["id"] if data else None
    page = {"object": "list", "data": data, "has_more": has_more, "next_after": last}
    return JSONResponse(page)


def _definition(body: ScheduleFields) -> Definition:
    try:
        return body.definition()
    except ValueError as error:
        raise _bad_task(error) from None


def _changed(definition: Definition, changes: dict[str, Any]) -> Definition:
    try:
        return changed(definition, changes)
    except ValidationError as error:
        raise invalid_body(*findings(error)[0]) from None
    except ValueError as error:
        raise _bad_task(error) from None


def _bad_task(error: ValueError) -> RefusedRequestError:
    return invalid_body(("task",), str(error).removeprefix("task: "))


def _usable(store: Store, names: ModelNames, caller: Caller, definition: Definition) -> Definition:
    """The definition, if its file and its model are there; raises RefusedRequestError."""
    if definition.file_id is None:
        return definition
    if definition.model is not None:
        names.read(may_wait=True).choose(definition.model, waits=False)
    try:
        file = store.files.get(checked_file_id(definition.file_id), caller.tenant)
    except UnknownFileError as error:
        message = f"body.file: {error}, or its upload has not ended"
        raise RefusedRequestError(404, "unknown_file", message, "body.file") from None
    if file.purpose is not FilePurpose.BATCH:
        raise invalid_body(("file",), "upload the lines with the purpose 'batch'")
    return definition


def _named(schedule: str) -> str:
    """The name or id, if a schedule can have it; raises UnknownScheduleError."""
    if not is_id(schedule):
        raise UnknownScheduleError(schedule[:64])
    return schedule


def _after(given: str | None, prefix: str, param: str = "after") -> str | None:
    if given is not None and not (is_id(given) and given.startswith(prefix)):
        message = f"{param}: is no id of this list, which begin with {prefix}"
        raise RefusedRequestError(400, "invalid_parameter", message, param)
    return given
