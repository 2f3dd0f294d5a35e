"""An upload of batch lines: parsed while it arrives, in bounded memory, into one job."""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace

from fastapi import Request
from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool

from nightjar.jobs.api.body import (
    RefusedRequestError,
    UploadLimits,
    refuse_compressed,
    refuse_too_large,
)
from nightjar.jobs.api.caller import caller_of
from nightjar.jobs.api.model_names import ModelNames
from nightjar.jobs.api.parameters import (
    parse_flag,
    parse_idempotency_key,
    parse_keep_results,
    parse_metadata,
    parse_priority,
    parse_window,
)
from nightjar.jobs.api.payloads import job_payload
from nightjar.jobs.api.places import UploadPlaces
from nightjar.jobs.api.schemas import JobPayload, SubmittedJob
from nightjar.jobs.lines.batch_lines import BatchReader
from nightjar.jobs.lines.file_kinds import HEAD_BYTES, other_format
from nightjar.jobs.model_choice import RowsModel
from nightjar.jobs.records import JobLimits, NewJob, NewRequest, RejectedRow
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
        names: ModelNames,
        limits: UploadLimits,
        places: UploadPlaces,
    ) -> None:
        self._jobs = jobs
        self._wake = wake
        self._names = names
        self._limits = limits
        self._places = places

    async def receive(self, request: Request) -> tuple[int, JobPayload | SubmittedJob]:
        """The status and the body of the answer to `POST /v1/jobs`; raises RefusedRequestError."""
        self.check_headers(request)
        new_job = self.new_job(request)
        model: RowsModel | None = None
        if request.query_params.get("model") is None:
            choices = await run_in_threadpool(self._names.read, may_wait=True)
            model = RowsModel(choices, waits=_waits(request))
        else:
            new_job = await run_in_threadpool(self.with_model, new_job, request)
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
            arriving = _Arriving(submission, model, digest)
            await run_in_threadpool(arriving.take, first)
            async for piece in pieces:
                await run_in_threadpool(arriving.take, piece)
            await run_in_threadpool(arriving.end)
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

    def check_headers(self, request: Request) -> None:
        """Raise RefusedRequestError for a body that cannot be batch lines, or is too long."""
        kind = request.headers.get("content-type", "text/plain").partition(";")[0].strip().lower()
        if kind not in CONTENT_TYPES:
            raise RefusedRequestError(
                415,
                "unsupported_content_type",
                "send the batch lines themselves, as application/jsonl",
                "Content-Type",
            )
        refuse_compressed(request.headers, "the batch lines")
        refuse_too_large(request.headers, self._limits)

    def new_job(self, request: Request) -> NewJob:
        """The job that the parameters ask for; its model is found later."""
        query = request.query_params
        key = parse_idempotency_key(request.headers.get("idempotency-key"))
        window_s = parse_window(query.get("completion_window"))
        priority = parse_priority(query.get("priority"))
        limits = JobLimits(self._limits.max_rows, self._limits.max_rejected)
        metadata = parse_metadata(query.get("metadata"))
        default = self._names.configured.default or ""
        tenant = caller_of(request).tenant
        return NewJob(
            default,
            key,
            metadata,
            window_s,
            priority,
            limits=limits,
            tenant=tenant,
            keep_results_s=parse_keep_results(query.get("keep_results")),
        )

    def with_model(self, new_job: NewJob, request: Request) -> NewJob:
        """The job for the model that the parameters name, or the only one."""
        asked = request.query_params.get("model") or None
        chosen = self._names.read(may_wait=True).choose(asked, waits=_waits(request))
        return replace(new_job, model=chosen.name, names_model=chosen.is_named)

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


def _waits(request: Request) -> bool:
    return parse_flag("wait_for_model", request.query_params.get("wait_for_model"))


class _Arriving:
    """The rows of an upload on their way into a job; used in threads, one after another.

    model: Finds the job's model in the rows; None where the parameters named it.
    digest: Of everything that was sent; None where nobody compares it.
    """

    def __init__(
        self, submission: Submission, model: RowsModel | None, digest: "hashlib._Hash | None"
    ) -> None:
        self._submission = submission
        self._model = model
        self._digest = digest
        self._reader = BatchReader()

    def take(self, piece: bytes) -> None:
        """Read a piece of the body."""
        if self._digest is not None:
            self._digest.update(piece)
        if not self._submission.existing:
            self._add(self._reader.rows(piece))

    def end(self) -> None:
        """Read the last row, and settle the job's model; raises ModelNameError."""
        if self._submission.existing:
            return
        self._add(self._reader.last_rows())
        if self._model is not None:
            chosen = self._model.choice()
            self._submission.use_model(chosen.name, is_named=chosen.is_named)

    def _add(self, rows: list[NewRequest | RejectedRow]) -> None:
        if self._model is not None:
            self._model.look(rows)
        self._submission.add(rows)


def _digest_of(new_job: NewJob) -> "hashlib._Hash":
    """A digest that has taken in the job's parameters, and goes on with its rows."""
    parameters = [
        new_job.model,
        sorted(new_job.metadata.items()),
        new_job.completion_window_s,
        new_job.priority,
    ]
    if new_job.keep_results_s is not None:  # digests of the version before stay as they are
        parameters.append(new_job.keep_results_s)
    return hashlib.sha256(json.dumps(parameters).encode() + b"\n")
