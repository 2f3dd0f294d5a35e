"""Open jobs over HTTP: made without rows, appended to in parts, sealed."""

import hashlib
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import Field

from nightjar.jobs.api import examples
from nightjar.jobs.api.body import RefusedRequestError, UploadLimits, refuse_too_large
from nightjar.jobs.api.caller import Submitter
from nightjar.jobs.api.documenting import JobId, documented
from nightjar.jobs.api.payloads import job_payload
from nightjar.jobs.api.places import UploadPlaces
from nightjar.jobs.api.results import MAX_AFTER, checked_id
from nightjar.jobs.api.schemas import AppendedRows, JobPayload
from nightjar.jobs.api.upload import Uploads
from nightjar.jobs.api.upload_document import OPENING, PART
from nightjar.jobs.append_records import MOST_PART_BYTES, MOST_ROWS
from nightjar.jobs.lines.batch_lines import BatchReader
from nightjar.jobs.records import NewRequest, RejectedRow
from nightjar.jobs.store import Store

First = Annotated[
    int, Query(ge=0, le=MAX_AFTER, description="How many rows the job has before these.")
]
RowCount = Annotated[
    Annotated[int, Field(ge=0, le=MAX_AFTER)] | None,
    Query(description="How many rows were appended; another number is refused."),
]


def open_jobs_router(store: Store, uploads: Uploads, limits: UploadLimits) -> APIRouter:
    """Opens jobs, takes their rows and seals them."""
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
    limits = replace(limits, max_bytes=min(limits.max_bytes, MOST_PART_BYTES))
    places = UploadPlaces(limits)

    @router.post(
        "/open",
        status_code=201,
        response_model=JobPayload,
        responses=documented(examples.OPEN_JOB, 400, 404, status=201, again=JobPayload),
        openapi_extra=OPENING,
    )
    def open_job(request: Request, _: Submitter) -> JSONResponse:
        """Make a job without rows, for a producer that has them one after another.

        With an `Idempotency-Key` that opened a job before, the answer is that job, with status 200.
        """
        new_job = uploads.with_model(uploads.new_job(request), request)
        job, existing = store.appending.open(new_job)
        return JSONResponse(job_payload(job), status_code=200 if existing else 201)

    @router.post(
        "/{job_id}/rows",
        response_model=AppendedRows,
        responses=documented(examples.APPENDED, 400, 404, 408, 409, 413, 415),
        openapi_extra=PART,
    )
    async def append_rows(job_id: JobId, first: First, request: Request, _: Submitter) -> Response:
        """Append batch lines to an open job: at most 10,000, of 16 MiB together.

        A part that is sent again is not stored again. Where too many rows wait, the answer is 429.
        """
        uploads.check_headers(request)
        refuse_too_large(request.headers, limits)
        digest, reader = hashlib.sha256(), BatchReader(first=first)
        rows: list[NewRequest | RejectedRow] = []
        async with places.place():
            async for piece in places.pieces(request):
                digest.update(piece)
                rows += await run_in_threadpool(reader.rows, piece)
                _check_count(rows)
            rows += reader.last_rows()
            _check_count(rows)
            if not rows:
                raise RefusedRequestError(400, "empty_part", "send at least one batch line")
            named = checked_id(job_id)
            done = await run_in_threadpool(
                store.appending.append, named, first, rows, digest.hexdigest()
            )
        told: AppendedRows = {
            "job_id": named,
            "total": done.total,
            "rejected": done.rejected,
            "existing": done.existing,
            "warning": await run_in_threadpool(uploads.try_to_wake, named),
        }
        return JSONResponse(told)

    @router.post(
        "/{job_id}/seal",
        response_model=JobPayload,
        responses=documented(examples.JOB, 400, 404, 409),
    )
    def seal_job(job_id: JobId, _: Submitter, rows: RowCount = None) -> JSONResponse:
        """Take no more rows: the job ends when all of its rows have their outcome."""
        return JSONResponse(job_payload(store.appending.seal(checked_id(job_id), rows)))

    return router


def _check_count(rows: list[NewRequest | RejectedRow]) -> None:
    if len(rows) > MOST_ROWS:
        raise RefusedRequestError(
            413, "too_many_rows", f"more than {MOST_ROWS} lines in one part; send several parts"
        )
