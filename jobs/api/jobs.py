"""Native jobs over HTTP: submit, follow and steer them.

That a job is the caller's is checked for all routes at once: `jobs/api/ownership.py`.
"""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from nightjar.jobs.api.caller import Reader, Submitter
from nightjar.jobs.api.forwarding import UploadForwarder
from nightjar.jobs.api.payloads import job_payload
from nightjar.jobs.api.results import checked_after, checked_id
from nightjar.jobs.api.upload import Uploads
from nightjar.jobs.records import JsonObject
from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.store import Store
from nightjar.jobs.store.waiting import Waiting


def jobs_router(store: Store, uploads: Uploads, forwarder: UploadForwarder | None) -> APIRouter:
    """Submit a job, cancel, pause, resume or retry it."""
    router = APIRouter(prefix="/v1/jobs")

    @router.post("", status_code=201)
    async def submit(request: Request, _: Submitter) -> Response:
        """Batch lines in, one job out."""
        if forwarder is not None:
            return await forwarder.forward(request)
        status, payload = await uploads.receive(request)
        return JSONResponse(payload, status_code=status)

    @router.post("/{job_id}/cancel")
    def cancel_job(job_id: str, _: Submitter) -> JsonObject:
        """Stop a job; what has landed stays."""
        return job_payload(store.stopping.cancel(checked_id(job_id)))

    @router.post("/{job_id}/pause")
    def pause_job(job_id: str, _: Submitter) -> JsonObject:
        """Begin nothing more of a job; what is being computed finishes."""
        return job_payload(store.stopping.pause(checked_id(job_id)))

    @router.post("/{job_id}/resume")
    def resume_job(job_id: str, _: Submitter) -> JsonObject:
        """Go on with a paused job."""
        job = store.stopping.resume(checked_id(job_id))
        return job_payload(job) | {"warning": uploads.try_to_wake(job_id)}

    @router.post("/{job_id}/retry")
    def retry_job(job_id: str, _: Submitter) -> JsonObject:
        """Compute what failed through no fault of the request again."""
        retried = store.retries.retry(checked_id(job_id))
        warning = uploads.try_to_wake(job_id) if retried else None
        return job_payload(store.jobs.get(job_id)) | {"retried": retried, "warning": warning}

    return router


def following_router(store: Store) -> APIRouter:
    """Lists jobs and shows one."""
    router = APIRouter(prefix="/v1/jobs")

    @router.get("")
    def list_jobs(
        caller: Reader,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: str | None = None,
    ) -> JsonObject:
        """Jobs, newest first."""
        found = store.jobs.newest(limit + 1, checked_after(after), caller.tenant)
        data = [job_payload(job) for job in found[:limit]]
        return {
            "object": "list",
            "data": data,
            "has_more": len(found) > limit,
            "next_after": data[-1]["id"] if data else None,
        }

    @router.get("/{job_id}")
    def show_job(job_id: str, _: Reader) -> JsonObject:
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
