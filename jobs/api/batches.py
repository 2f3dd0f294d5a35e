"""Batches over HTTP, in the shape of OpenAI's API: make, list, show and cancel them."""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from nightjar.jobs.api import openai_examples as examples
from nightjar.jobs.api.batch_bodies import (
    MAX_BODY_BYTES,
    CreateBatch,
    batch_payload,
    new_batch,
)
from nightjar.jobs.api.body import RefusedRequestError, UploadLimits
from nightjar.jobs.api.caller import Reader, Submitter
from nightjar.jobs.api.documenting import documented
from nightjar.jobs.api.files import checked_file_id, list_payload
from nightjar.jobs.api.json_body import read_json_object
from nightjar.jobs.api.model_names import ModelNames
from nightjar.jobs.api.openai_schemas import BatchList, BatchPayload
from nightjar.jobs.api.parameters import parse_idempotency_key
from nightjar.jobs.api.request_bodies import body_documented
from nightjar.jobs.api.results import is_id
from nightjar.jobs.api.upload_document import IDEMPOTENCY_KEY
from nightjar.jobs.batch_records import Batch, NewBatch
from nightjar.jobs.errors import UnknownBatchError, UnknownFileError
from nightjar.jobs.file_records import FilePurpose
from nightjar.jobs.store import Store

MAX_BATCHES = 100  # of a page, as OpenAI's
_LONGEST_SHOWN = 64

BatchId = Annotated[str, Path(description="The id of a batch.", examples=["batch_019a8f0e6c1b2d"])]

_BODY = {"parameters": [IDEMPOTENCY_KEY], **body_documented(CreateBatch, examples.NEW_BATCH)}


def batches_router(
    store: Store,
    try_to_wake: Callable[[str], str | None],
    names: ModelNames,
    limits: UploadLimits,
) -> APIRouter:
    """`/v1/batches`."""
    router = APIRouter(prefix="/v1/batches", tags=["batches"])
    default = names.configured.default

    @router.post(
        "",
        response_model=BatchPayload,
        responses=documented(examples.BATCH, 400, 404, 408, 409, 413, 415),
        openapi_extra=_BODY,
    )
    async def create_batch(request: Request, caller: Submitter) -> JSONResponse:
        """Compute the lines of a file; answers before the file is read.

        With an `Idempotency-Key` that made a batch before, the answer is that batch.
        """
        key = parse_idempotency_key(request.headers.get("idempotency-key"))
        data = await read_json_object(request, limits, MAX_BODY_BYTES)
        new = await run_in_threadpool(new_batch, data, caller.tenant, names, key)
        batch = await run_in_threadpool(_create, store, new)
        # Without the broker the planner looks by itself: the answer is the same.
        await run_in_threadpool(try_to_wake, batch.job_id)
        return JSONResponse(batch_payload(batch, default))

    @router.get("", response_model=BatchList, responses=documented(examples.BATCH_LIST, 400))
    def list_batches(
        caller: Reader,
        limit: Annotated[int, Query(ge=1, le=MAX_BATCHES)] = 20,
        after: str | None = None,
    ) -> JSONResponse:
        """The caller's batches, newest first; ask on with `after=last_id` while `has_more`."""
        try:
            behind = None if after is None else _checked_id(after)
            found = store.batches.newest(limit + 1, caller.tenant, behind)
        except UnknownBatchError as error:
            message = f"after: this list has no batch {error.batch_id!r}"
            raise RefusedRequestError(400, "invalid_after", message, "after") from error
        return JSONResponse(list_payload([batch_payload(one, default) for one in found], limit))

    @router.get(
        "/{batch_id}", response_model=BatchPayload, responses=documented(examples.BATCH, 404)
    )
    def show_batch(batch_id: BatchId, caller: Reader) -> JSONResponse:
        """A batch as it stands."""
        found = store.batches.get(_checked_id(batch_id), caller.tenant)
        return JSONResponse(batch_payload(found, default))

    @router.post(
        "/{batch_id}/cancel",
        response_model=BatchPayload,
        responses=documented(examples.BATCH, 404, 409),
    )
    def cancel_batch(batch_id: BatchId, caller: Submitter) -> JSONResponse:
        """Ask for the end of a batch; what has landed stays."""
        batch = store.batches.cancel(_checked_id(batch_id), caller.tenant)
        try_to_wake(batch.job_id)
        return JSONResponse(batch_payload(batch, default))

    return router


def _create(store: Store, new: NewBatch) -> Batch:
    try:
        if (made := store.batches.made_by(new)) is not None:
            return made
        file = store.files.get(checked_file_id(new.input_file_id), new.tenant)
        if file.purpose is not FilePurpose.BATCH:
            message = (
                f"input_file_id: the file {file.id!r} is for {file.purpose.value!r}; upload the "
                "lines with the purpose 'batch'"
            )
            raise RefusedRequestError(400, "invalid_file_purpose", message, "input_file_id")
        return store.batches.create(new)
    except UnknownFileError as error:
        message = f"input_file_id: {error}, or its upload has not ended"
        raise RefusedRequestError(404, "unknown_file", message, "input_file_id") from error


def _checked_id(batch_id: str) -> str:
    """The id, if a batch can have it; raises UnknownBatchError."""
    if not is_id(batch_id):
        raise UnknownBatchError(batch_id[:_LONGEST_SHOWN])
    return batch_id
