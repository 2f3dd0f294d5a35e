"""The HTTP API over the store: submit a job, follow it, steer it, fetch its results.

Endpoints that ask the store are plain functions: FastAPI runs them in threads,
so that a slow database never stops the event loop.
"""

import logging
from collections.abc import Callable, Collection
from typing import Annotated

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse

import nightjar
from nightjar.jobs.api.body import RefusedRequestError, UploadLimits
from nightjar.jobs.api.forwarding import UploadForwarder, UploadTaker
from nightjar.jobs.api.guard import BrowserGuard
from nightjar.jobs.api.health import Deployment, health_router, public_message
from nightjar.jobs.api.payloads import error_payload, job_payload
from nightjar.jobs.api.results import checked_after, checked_id, results_router
from nightjar.jobs.api.upload import Uploads
from nightjar.jobs.errors import (
    EmptyJobError,
    JobError,
    LifecycleError,
    ReusedKeyError,
    StoreError,
    StoreUnavailableError,
    TooManyRejectedError,
    TooManyRowsError,
    UnknownJobError,
)
from nightjar.jobs.records import JsonObject
from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.store import Store
from nightjar.jobs.store.waiting import Waiting

logger = logging.getLogger(__name__)

# FastAPI's own page loads a script from the internet, and is blank without it.
DOCS = """<!doctype html><html lang="en"><title>Nightjar's API</title>
<p>The description of this API is <a href="openapi.json">openapi.json</a>, in OpenAPI's format.
Any viewer of that format shows it.</p></html>
"""


def create_app(
    store: Store,
    wake: Callable[[str], None],
    *,
    served_model: str | None = None,
    limits: UploadLimits | None = None,
    taker: UploadTaker | None = None,
    deployment: Deployment | None = None,
    trusted_hosts: Collection[str] = (),
) -> FastAPI:
    """The application over a store whose tables exist.

    `wake` tells the planner of a new job's id; it may fail, then the job waits
    for the planner's own rounds. `served_model` is the model of jobs that name
    none in `?model=`, and the only one that may be named; None accepts any.
    `taker` is another process with this application that takes the uploads; None
    takes them here. `deployment` knows of the other processes; None says nothing of them.
    `trusted_hosts` are names under which the API is reached beside loopback and addresses.
    """
    app = FastAPI(title="Nightjar", version=nightjar.__version__, docs_url=None, redoc_url=None)
    app.add_middleware(BrowserGuard, hosts=trusted_hosts)
    limits = limits or UploadLimits()
    uploads = Uploads(store.jobs, wake, served_model, limits)
    forwarder = None if taker is None else UploadForwarder(taker, limits)
    health = health_router(store, taker, deployment)
    routers = (_jobs_router(store, uploads, forwarder), _following_router(store))
    for router in (*routers, results_router(store), health):
        app.include_router(router)

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(DOCS)

    app.add_exception_handler(JobError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_bad_parameter)
    return app


def _jobs_router(store: Store, uploads: Uploads, forwarder: UploadForwarder | None) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs")

    @router.post("", status_code=201)
    async def submit(request: Request) -> Response:
        """Batch lines in, one job out."""
        if forwarder is not None:
            return await forwarder.forward(request)
        status, payload = await uploads.receive(request)
        return JSONResponse(payload, status_code=status)

    @router.post("/{job_id}/cancel")
    def cancel_job(job_id: str) -> JsonObject:
        """Stop a job; what has landed stays."""
        return job_payload(store.stopping.cancel(checked_id(job_id)))

    @router.post("/{job_id}/pause")
    def pause_job(job_id: str) -> JsonObject:
        """Begin nothing more of a job; what is being computed finishes."""
        return job_payload(store.stopping.pause(checked_id(job_id)))

    @router.post("/{job_id}/resume")
    def resume_job(job_id: str) -> JsonObject:
        """Go on with a paused job."""
        job = store.stopping.resume(checked_id(job_id))
        return job_payload(job) | {"warning": uploads.try_to_wake(job_id)}

    @router.post("/{job_id}/retry")
    def retry_job(job_id: str) -> JsonObject:
        """Compute what failed through no fault of the request again."""
        retried = store.retries.retry(checked_id(job_id))
        warning = uploads.try_to_wake(job_id) if retried else None
        return job_payload(store.jobs.get(job_id)) | {"retried": retried, "warning": warning}

    return router


def _following_router(store: Store) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs")

    @router.get("")
    def list_jobs(
        limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
    ) -> JsonObject:
        """Jobs, newest first."""
        found = store.jobs.newest(limit + 1, checked_after(after))
        data = [job_payload(job) for job in found[:limit]]
        return {
            "object": "list",
            "data": data,
            "has_more": len(found) > limit,
            "next_after": data[-1]["id"] if data else None,
        }

    @router.get("/{job_id}")
    def show_job(job_id: str) -> JsonObject:
        """A job with its micro-batches by state, and what it waits for."""
        job, counts = store.jobs.get_in_detail(checked_id(job_id))
        payload = job_payload(job)
        # A job that is being computed waits for nothing: polls of it cost no further look.
        goes_on = job.is_over or counts.get(MicroBatchState.LEASED, 0) > 0
        waiting = Waiting() if goes_on else store.jobs.waiting_for(job_id)
        payload |= {"waits_for": list(waiting.waits_for), "waiting": waiting.message}
        payload["micro_batches"] = {state.value: count for state, count in counts.items()}
        return payload

    return router


def _answer_error(request: Request, error: Exception) -> JSONResponse:
    """A JobError as an HTTP answer in OpenAI's error shape."""
    if isinstance(error, RefusedRequestError):
        payload = error_payload(error.code, str(error), error.param)
        return JSONResponse(payload, status_code=error.status)
    status, code = next(
        (answer for kind, answer in _STATUS_CODES if isinstance(error, kind)), (400, "invalid_job")
    )
    message = str(error)
    if status >= 500:
        logger.error("request failed: %s", error, extra={"action": "api_error", "code": code})
    if isinstance(error, StoreError):
        message = public_message(error)
    return JSONResponse(error_payload(code, message), status_code=status)


def _answer_bad_parameter(request: Request, error: Exception) -> JSONResponse:
    """A wrong query parameter, without the value that was sent."""
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    param = str(first["loc"][-1])
    return JSONResponse(
        error_payload("invalid_parameter", f"{param}: {first['msg']}", param), status_code=400
    )


# The first that fits counts.
_STATUS_CODES: list[tuple[type[JobError], tuple[int, str]]] = [
    (UnknownJobError, (404, "unknown_job")),
    (EmptyJobError, (400, "empty_job")),
    (TooManyRowsError, (413, "too_many_rows")),
    (TooManyRejectedError, (400, "too_many_rejected")),
    (ReusedKeyError, (409, "idempotency_key_reused")),
    (LifecycleError, (409, "wrong_state")),
    (StoreUnavailableError, (503, "database_unavailable")),
    (StoreError, (500, "store_error")),
]
