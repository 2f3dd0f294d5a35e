"""What `POST /v1/batches` is sent, and what the API says of a batch."""

import hashlib
import json
from datetime import datetime
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.model_names import ModelNames
from nightjar.jobs.api.openai_schemas import (
    BatchCounts,
    BatchError,
    BatchErrors,
    BatchPayload,
    BatchUsage,
)
from nightjar.jobs.api.parameters import (
    MAX_PRIORITY,
    METADATA_SCHEMA,
    check_metadata,
    parse_window,
)
from nightjar.jobs.batch_records import Batch, NewBatch
from nightjar.jobs.lines.body_schemas import describe_nulls
from nightjar.jobs.lines.parsing import URLS
from nightjar.jobs.model_choice import MOST_CHARACTERS
from nightjar.jobs.records import Job, JsonObject, is_text
from nightjar.jobs.states import BatchStatus

MAX_BODY_BYTES = 256 * 1024  # 16 pairs of metadata, all of it escaped, take 110 KB
_LONGEST_FIELD = 40  # characters of its name that are shown


class OutputExpiry(BaseModel):
    """When the result files expire."""

    model_config = ConfigDict(strict=True, extra="forbid")

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3_600, le=2_592_000)]


class CreateBatch(BaseModel):
    """The body of `POST /v1/batches`: OpenAI's fields, then Nightjar's."""

    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra=describe_nulls)

    input_file_id: Annotated[str, Field(min_length=1)]
    endpoint: Annotated[str, Field(json_schema_extra={"enum": list(URLS)})]
    completion_window: str = "24h"
    metadata: Annotated[Any, WithJsonSchema(METADATA_SCHEMA)] = None
    output_expires_after: OutputExpiry | None = None
    strict: bool = False
    model: str | None = None
    priority: Annotated[int, Field(ge=0, le=MAX_PRIORITY)] = 0
    wait_for_model: bool = False


def new_batch(
    data: JsonObject, tenant: str, names: ModelNames, idempotency_key: str | None = None
) -> NewBatch:
    """The batch that a body asks for; raises RefusedRequestError or ModelNameError."""
    try:
        # null stands for "the default" in OpenAI's API.
        body = CreateBatch.model_validate({k: v for k, v in data.items() if v is not None})
    except ValidationError as error:
        raise _refusal(error) from None
    if body.endpoint not in URLS:
        message = f"endpoint: is not served; give one of {', '.join(URLS)}"
        raise RefusedRequestError(400, "invalid_value", message, "endpoint")
    model = None if body.model is None else _named_model(body, names)
    window_s = parse_window(body.completion_window)
    expiry = body.output_expires_after
    return NewBatch(
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        tenant=tenant,
        completion_window=body.completion_window,
        completion_window_s=window_s or 0.0,
        metadata={} if body.metadata is None else check_metadata(body.metadata),
        strict=body.strict,
        model=model,
        priority=body.priority,
        output_expires_after_s=None if expiry is None else expiry.seconds,
        waits_for_model=body.wait_for_model,
        idempotency_key=idempotency_key,
        digest=None if idempotency_key is None else _digest(body),
    )


def _digest(body: CreateBatch) -> str:
    """SHA-256 of the fields, but for the file: an upload of the same bytes has another id."""
    fields = body.model_dump(exclude={"input_file_id"})
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def batch_payload(batch: Batch, default_model: str | None) -> BatchPayload:
    """A batch as OpenAI's API shows it; moments are whole seconds since 1970.

    default_model: Of batches whose file is not read yet and that name none.
    """
    job, status = batch.job, batch.status
    is_cancelled = batch.cancelling_at is not None
    is_purged = job is not None and job.purged_at is not None
    finalizing_at = None if job is None or is_cancelled else job.finished_at
    ended_at = {status: batch.ended_at}
    errors: BatchErrors = {
        "object": "list",
        "data": [cast(BatchError, one) for one in batch.errors],
    }
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model or default_model if job is None else job.model,
        "errors": errors if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": status,
        "output_file_id": None if is_purged else batch.output_file_id,
        "error_file_id": None if is_purged else batch.error_file_id,
        "created_at": int(batch.created_at.timestamp()),
        "in_progress_at": _seconds(batch.in_progress_at),
        "expires_at": int(batch.created_at.timestamp() + batch.completion_window_s),
        "finalizing_at": _seconds(finalizing_at),
        "completed_at": _seconds(ended_at.get(BatchStatus.COMPLETED)),
        "failed_at": _seconds(ended_at.get(BatchStatus.FAILED)),
        "expired_at": _seconds(ended_at.get(BatchStatus.EXPIRED)),
        "cancelling_at": _seconds(batch.cancelling_at),
        "cancelled_at": _seconds(ended_at.get(BatchStatus.CANCELLED)),
        "request_counts": _counts(job),
        "usage": None if job is None else _usage(job),
        "metadata": dict(batch.metadata),
        "strict": batch.strict,
        "priority": batch.priority,
        "job_id": batch.job_id,
        "purged_at": None if job is None else _seconds(job.purged_at),
    }


def _counts(job: Job | None) -> BatchCounts:
    if job is None:
        return {"total": 0, "completed": 0, "failed": 0, "cancelled": 0}
    return {
        "total": job.total,
        "completed": job.completed,
        "failed": job.failed,
        "cancelled": job.cancelled,  # not computed: cancelled, or expired
    }


def _usage(job: Job) -> BatchUsage:
    return {
        "input_tokens": job.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": job.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": job.prompt_tokens + job.completion_tokens,
    }


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())


def _named_model(body: CreateBatch, names: ModelNames) -> str | None:
    """The model that a batch is for; None where its lines or the deployment decide."""
    if not is_text(body.model, MOST_CHARACTERS):
        message = f"model: give a name of at most {MOST_CHARACTERS} characters"
        raise RefusedRequestError(400, "invalid_value", message, "model")
    chosen = names.read(may_wait=True).choose(body.model, waits=body.wait_for_model)
    return chosen.name if chosen.is_named else None


def _refusal(error: ValidationError) -> RefusedRequestError:
    """The first of pydantic's findings as a refusal, without the value that was sent."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = ".".join(
        ascii(part)[1:-1] if isinstance(part, str) else str(part) for part in first["loc"]
    )
    param = param[:_LONGEST_FIELD]
    if first["type"] == "missing":
        return RefusedRequestError(
            400, "missing_required_parameter", f"{param}: is missing; give it", param
        )
    if first["type"] == "extra_forbidden":
        known = ", ".join(CreateBatch.model_fields)
        message = f"{param}: is not a field of a batch; leave it out. The fields are {known}"
        return RefusedRequestError(400, "unknown_parameter", message, param)
    finding = first["msg"].removeprefix("Input ")
    return RefusedRequestError(400, "invalid_value", f"{param}: {finding}", param)
