"""An upload of batch lines: parsed while it arrives, in bounded memory, into one job."""

import hashlib
import json
import logging
from collections.abc import Callable

from fastapi import Request
from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool

from nightjar.jobs.api.body import RefusedRequestError, UploadLimits, too_large
from nightjar.jobs.api.caller import caller_of
from nightjar.jobs.api.parameters import is_text, parse_metadata, parse_priority, parse_window
from nightjar.jobs.api.payloads import job_payload
from nightjar.jobs.api.places import UploadPlaces
from nightjar.jobs.api.schemas import JobPayload, SubmittedJob
from nightjar.jobs.lines.batch_lines import BatchReader
from nightjar.jobs.lines.file_kinds import HEAD_BYTES, other_format
from nightjar.jobs.records import JobLimits, NewJob
from nightjar.jobs.store.jobs import Jobs
from nightjar.jobs.store.submission import Submission

logger = logging.getLogger(__name__)

CONTENT_TYPES = frozenset(
    {
        "application/jsonl",
        "application/x-ndjson",
        "application/json",
        "application/octet-stream",
        "text/plain",
        # What curl --data-binary says of anything. A browser's form has an Origin: see guard.py.
        "application/x-www-form-urlencoded",
    }
)


class Uploads:
    """Receives jobs and submits them; `wake` tells the planner of them."""

    def __init__(
        self,
        jobs: Jobs,
        wake: Callable[[str], None],
        served_model: str | None,
        limits: UploadLimits,
        places: UploadPlaces,
    ) -> None:
        self._jobs = jobs
        self._wake = wake
        self._served_model = served_model
        self._limits = limits
        self._places = places

    async def receive(self, request: Request) -> tuple[int, JobPayload | SubmittedJob]:
        """The status and the body of the answer to `POST /v1/jobs`; raises RefusedRequestError."""
        self._check_headers(request)
        new_job = self._new_job(request)
        digest = None if new_job.idempotency_key is None else _digest_of(new_job)
        pieces = self._places.pieces(request)
        # Who sends a little at a time, or little in all, holds no place before it is here.
        first = await anext(pieces)
        if (fault := other_format(first[:HEAD_BYTES])) is not None:
            raise RefusedRequestError(400, "not_batch_lines", f"the upload {fault}")
        async with (
            self._places.place(),
            contextmanager_in_threadpool(self._jobs.submit(new_job)) as submission,
        ):
            reader = BatchReader()
            await run_in_threadpool(_take, submission, reader, first, digest)
            async for piece in pieces:
                await run_in_threadpool(_take, submission, reader, piece, digest)
            await run_in_threadpool(lambda: submission.add(reader.last_rows()))
            submission.digest = None if digest is None else digest.hexdigest()
        if submission.existing:
            known = await run_in_threadpool(self._jobs.get, submission.job_id)
            return 200, job_payload(known)
        warning = await run_in_threadpool(self.try_to_wake, submission.job_id)
        job = await run_in_threadpool(self._jobs.get, submission.job_id)
        return 201, {
            **job_payload(job),
            "accepted": submission.accepted,
            "rejected": submission.rejected,
            "warning": warning,
        }

    def _check_headers(self, request: Request) -> None:
        kind = request.headers.get("content-type", "text/plain").partition(";")[0].strip().lower()
        if kind not in CONTENT_TYPES:
            raise RefusedRequestError(
                415,
                "unsupported_content_type",
                "send the batch lines themselves, as application/jsonl",
                "Content-Type",
            )
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._limits.max_bytes:
            raise too_large(self._limits)

    def _new_job(self, request: Request) -> NewJob:
        query = request.query_params
        model = query.get("model") or self._served_model
        if not model or not is_text(model, 512):
            raise RefusedRequestError(
                400,
                "missing_model",
                "name the model of the job in ?model=, at most 512 characters",
                "model",
            )
        if self._served_model not in (None, model):
            raise RefusedRequestError(
                400,
                "model_not_found",
                f"this queue serves the model {self._served_model!r}, not {model!r}; leave "
                "?model= out or name the served one",
                "model",
            )
        key = request.headers.get("idempotency-key")
        if key is not None and not is_text(key, 255):
            message = "must have 1 to 255 characters"
            raise RefusedRequestError(400, "invalid_idempotency_key", message, "Idempotency-Key")
        window_s = parse_window(query.get("completion_window"))
        priority = parse_priority(query.get("priority"))
        limits = JobLimits(self._limits.max_rows, self._limits.max_rejected)
        metadata = parse_metadata(query.get("metadata"))
        tenant = caller_of(request).tenant
        return NewJob(model, key, metadata, window_s, priority, limits=limits, tenant=tenant)

    def try_to_wake(self, job_id: str) -> str | None:
        """Tell the planner of a job.

        Returns None, or a warning: the job is safe in SQL, and the planner looks there by itself.
        """
        try:
            self._wake(job_id)
        except Exception:  # whatever the broker's client raises
            logger.warning(
                "planner not woken",
                exc_info=True,
                extra={"action": "wake_failed", "job_id": job_id},
            )
            return "the job is stored, but the broker cannot be reached: it starts when it is back"
        return None


def _take(
    submission: Submission, reader: BatchReader, piece: bytes, digest: "hashlib._Hash | None"
) -> None:
    if digest is not None:
        digest.update(piece)
    if not submission.existing:
        submission.add(reader.rows(piece))


def _digest_of(new_job: NewJob) -> "hashlib._Hash":
    """A digest that has taken in the job's parameters, and goes on with its rows."""
    parameters = [
        new_job.model,
        sorted(new_job.metadata.items()),
        new_job.completion_window_s,
        new_job.priority,
    ]
    return hashlib.sha256(json.dumps(parameters).encode() + b"\n")
