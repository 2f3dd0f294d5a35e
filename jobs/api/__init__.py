"""The HTTP API over the store: submit a job, follow it, steer it, fetch its results.

Endpoints that ask the store are plain functions: FastAPI runs them in threads,
so that a slow database never stops the event loop.
"""

import logging
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse

import nightjar
from nightjar.jobs.api.forwarding import UploadForwarder, UploadTaker
from nightjar.jobs.api.payloads import error_payload, job_payload, results_page
from nightjar.jobs.api.upload import RefusedRequestError, UploadLimits, Uploads
from nightjar.jobs.batch_lines import json_pieces
from nightjar.jobs.errors import (
    EmptyJobError,
    JobError,
    LifecycleError,
    StoreError,
    StoreUnavailableError,
    UnknownJobError,
)
from nightjar.jobs.records import JsonObject
from nightjar.jobs.store import Store
from nightjar.jobs.store.paging import Outcome

logger = logging.getLogger(__name__)

MAX_PAGE = 10_000


def create_app(
    store: Store,
    wake: Callable[[str], None],
    *,
    served_model: str | None = None,
    limits: UploadLimits | None = None,
    taker: UploadTaker | None = None,
) -> FastAPI:
    """The application over a store whose tables exist.

    `wake` tells the planner of a new job's id; it may fail, then the job waits
    for the planner's own rounds. `served_model` is the model of jobs that name
    none in `?model=`, and the only one that may be named; None accepts any.
    `taker` is another process with this application that takes the uploads; None
    takes them here.
    """
    app = FastAPI(title="Nightjar", version=nightjar.__version__)
    limits = limits or UploadLimits()
    uploads = Uploads(store, wake, served_model, limits)
    forwarder = None if taker is None else UploadForwarder(taker, limits)
    jobs = _jobs_router(store, uploads, forwarder)
    for router in (jobs, _results_router(store), _health_router(store, taker)):
        app.include_router(router)
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

    @router.get("")
    def list_jobs(
        limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
    ) -> JsonObject:
        """Jobs, newest first."""
        found = store.jobs(limit + 1, after)
        data = [job_payload(job) for job in found[:limit]]
        return {
            "object": "list",
            "data": data,
            "has_more": len(found) > limit,
            "next_after": data[-1]["id"] if data else None,
        }

    @router.get("/{job_id}")
    def show_job(job_id: str) -> JsonObject:
        """A job with its micro-batches by state."""
        job, counts = store.job_in_detail(job_id)
        payload = job_payload(job)
        payload["micro_batches"] = {state.value: count for state, count in counts.items()}
        return payload

    @router.post("/{job_id}/cancel")
    def cancel_job(job_id: str) -> JsonObject:
        """Stop a job; what has landed stays."""
        return job_payload(store.cancel(job_id))

    @router.post("/{job_id}/pause")
    def pause_job(job_id: str) -> JsonObject:
        """Begin nothing more of a job; what is being computed finishes."""
        return job_payload(store.pause(job_id))

    @router.post("/{job_id}/resume")
    def resume_job(job_id: str) -> JsonObject:
        """Go on with a paused job."""
        job = store.resume(job_id)
        return job_payload(job) | {"warning": uploads.try_to_wake(job_id)}

    @router.post("/{job_id}/retry")
    def retry_job(job_id: str) -> JsonObject:
        """Compute what failed through no fault of the request again."""
        retried = store.retry(job_id)
        warning = uploads.try_to_wake(job_id) if retried else None
        return job_payload(store.job(job_id)) | {"retried": retried, "warning": warning}

    return router


def _results_router(store: Store) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs/{job_id}")

    @router.get("/results")
    def page_results(
        job_id: str,
        after: Annotated[int, Query(ge=-1)] = -1,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 1_000,
        outcome: Outcome = "all",
    ) -> JsonObject:
        """A page of outcomes in row order; ask on with `after=next_after`."""
        store.job(job_id)
        # One more than asked for tells whether there is a next page.
        found = store.results(job_id, after_index=after, limit=limit + 1, outcome=outcome)
        return results_page(found, limit)

    @router.get("/output")
    def download_output(job_id: str) -> Response:
        """Every success as JSON lines."""
        return _download(store, job_id, "succeeded")

    @router.get("/errors")
    def download_errors(job_id: str) -> Response:
        """Every failure as JSON lines."""
        return _download(store, job_id, "failed")

    return router


def _health_router(store: Store, taker: UploadTaker | None) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    def health() -> JSONResponse:
        """200 while the database answers and uploads are taken; else 503, and why in `message`.

        An upload process that ended once is started again, and no reason for a 503.
        """
        body: JsonObject = {"status": "ok", "version": nightjar.__version__}
        troubles = []
        try:
            store.ping()
        except StoreError as error:
            logger.warning("database unreachable", extra={"action": "health_failed"})
            troubles.append(str(error))
        if taker is not None and (trouble := taker.trouble()):
            logger.warning("uploads are not taken", extra={"action": "health_failed"})
            troubles.append(trouble)
        if troubles:
            body |= {"status": "unavailable", "message": "; ".join(troubles)}
        return JSONResponse(body, status_code=503 if troubles else 200)

    return router


def _download(store: Store, job_id: str, outcome: Outcome) -> Response:
    store.job(job_id)  # before the answer begins: an unknown job is a 404
    records = store.iter_results(job_id, outcome=outcome)
    return StreamingResponse(json_pieces(records), media_type="application/jsonl")


def _answer_error(request: Request, error: Exception) -> JSONResponse:
    """A JobError as an HTTP answer in OpenAI's error shape."""
    if isinstance(error, RefusedRequestError):
        payload = error_payload(error.code, str(error), error.param)
        return JSONResponse(payload, status_code=error.status)
    status, code = next(
        (answer for kind, answer in _STATUS_CODES if isinstance(error, kind)), (400, "invalid_job")
    )
    if status >= 500:
        logger.error("request failed: %s", error, extra={"action": "api_error", "code": code})
    return JSONResponse(error_payload(code, str(error)), status_code=status)


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
    (LifecycleError, (409, "wrong_state")),
    (StoreUnavailableError, (503, "database_unavailable")),
    (StoreError, (500, "store_error")),
]
