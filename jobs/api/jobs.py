"""Native jobs over HTTP: submit, follow and steer them."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from nightjar.jobs.api import examples
from nightjar.jobs.api.caller import Reader, Submitter
from nightjar.jobs.api.documenting import JobId, documented
from nightjar.jobs.api.forwarding import UploadForwarder
from nightjar.jobs.api.payloads import job_payload
from nightjar.jobs.api.results import checked_after, checked_id
from nightjar.jobs.api.schemas import (
    JobDetail,
    JobList,
    JobPayload,
    ResumedJob,
    RetriedJob,
    SubmittedJob,
)
from nightjar.jobs.api.upload import Uploads
from nightjar.jobs.api.upload_document import UPLOAD
from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.store import Store
from nightjar.jobs.store.waiting import Waiting


def submitting_router(uploads: Uploads, forwarder: UploadForwarder | None) -> APIRouter:
    """Takes jobs; `forwarder` hands them on to another process."""
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

    @router.post(
        "",
        status_code=201,
        response_model=SubmittedJob,
        responses=documented(
            examples.SUBMITTED_JOB, 400, 404, 408, 409, 413, 415, status=201, again=SubmittedJob
        ),
        openapi_extra=UPLOAD,
    )
    async def submit_job(request: Request, _: Submitter) -> Response:
        """Make a job of batch lines: completions, chats and rankings, mixed if need be.

        With an `Idempotency-Key` that made a job before, the answer is that job, with status 200.
        """
        if forwarder is not None:
            return await forwarder.forward(request)
        status, payload = await uploads.receive(request)
        return JSONResponse(payload, status_code=status)

    return router


def steering_router(store: Store, uploads: Uploads) -> APIRouter:
    """Cancels, pauses, resumes and retries jobs."""
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

    @router.post(
        "/{job_id}/cancel",
        response_model=JobPayload,
        responses=documented(examples.JOB, 404),
    )
    def cancel_job(job_id: JobId, _: Submitter) -> JSONResponse:
        """Stop a job; what has landed stays."""
        return JSONResponse(job_payload(store.stopping.cancel(checked_id(job_id))))

    @router.post(
        "/{job_id}/pause",
        response_model=JobPayload,
        responses=documented(examples.JOB, 404),
    )
    def pause_job(job_id: JobId, _: Submitter) -> JSONResponse:
        """Begin nothing more of a job; what is being computed finishes."""
        return JSONResponse(job_payload(store.stopping.pause(checked_id(job_id))))

    @router.post(
        "/{job_id}/resume",
        response_model=ResumedJob,
        responses=documented({**examples.JOB, "warning": None}, 404),
    )
    def resume_job(job_id: JobId, _: Submitter) -> JSONResponse:
        """Go on with a paused job."""
        job = store.stopping.resume(checked_id(job_id))
        resumed: ResumedJob = {**job_payload(job), "warning": uploads.try_to_wake(job_id)}
        return JSONResponse(resumed)

    @router.post(
        "/{job_id}/retry",
        response_model=RetriedJob,
        responses=documented({**examples.JOB, "warning": None, "retried": 3}, 404, 409),
    )
    def retry_job(job_id: JobId, _: Submitter) -> JSONResponse:
        """Compute what failed through no fault of the request again."""
        retried = store.retries.retry(checked_id(job_id))
        warning = uploads.try_to_wake(job_id) if retried else None
        job = job_payload(store.jobs.get(job_id))
        again: RetriedJob = {**job, "retried": retried, "warning": warning}
        return JSONResponse(again)

    return router


def following_router(store: Store) -> APIRouter:
    """Lists jobs and shows one."""
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

    @router.get("", response_model=JobList, responses=documented(examples.JOB_LIST, 400))
    def list_jobs(
        caller: Reader,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: str | None = None,
    ) -> JSONResponse:
        """Jobs, newest first."""
        found = store.jobs.newest(limit + 1, checked_after(after), caller.tenant)
        data = [job_payload(job) for job in found[:limit]]
        page: JobList = {
            "object": "list",
            "data": data,
            "has_more": len(found) > limit,
            "next_after": data[-1]["id"] if data else None,
        }
        return JSONResponse(page)

    @router.get(
        "/{job_id}", response_model=JobDetail, responses=documented(examples.JOB_DETAIL, 404)
    )
    def show_job(job_id: JobId, _: Reader) -> JSONResponse:
        """A job with its micro-batches by state, and what it waits for."""
        job, counts = store.jobs.get_in_detail(checked_id(job_id))
        # A job that is being computed waits for nothing: polls of it cost no further look.
        goes_on = job.is_over or counts.get(MicroBatchState.LEASED, 0) > 0
        waiting = Waiting() if goes_on else store.jobs.waiting_for(job_id)
        detail: JobDetail = {
            **job_payload(job),
            "waits_for": list(waiting.waits_for),
            "waiting": waiting.message,
            "micro_batches": {state.value: count for state, count in counts.items()},
        }
        return JSONResponse(detail)

    return router
