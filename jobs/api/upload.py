"""An upload of batch lines: parsed while it arrives, in bounded memory, into one job."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fastapi import Request
from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool
from starlette.requests import ClientDisconnect

from nightjar.jobs.api.payloads import job_payload
from nightjar.jobs.batch_lines import BatchReader
from nightjar.jobs.errors import JobError
from nightjar.jobs.records import JsonObject, NewJob
from nightjar.jobs.store import Store
from nightjar.jobs.store.submission import Submission

logger = logging.getLogger(__name__)

UPLOADS_AT_ONCE = 4  # each of them holds a database connection
PARSE_BYTES = 256 * 1024  # a trip to a thread is worth so many bytes
CONTENT_TYPES = frozenset(
    {
        "application/jsonl",
        "application/x-ndjson",
        "application/json",
        "application/octet-stream",
        "text/plain",
    }
)
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY = 64  # characters
MAX_METADATA_VALUE = 512
MAX_PRIORITY = 9
_PRIORITIES = frozenset(map(str, range(MAX_PRIORITY + 1)))
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
MAX_WINDOW_S = 365 * _UNITS_S["d"]


class RefusedRequestError(JobError):
    """A request that the API refuses, with its HTTP status."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """How long a body may be, and for how long it may send nothing before it loses its place."""

    max_bytes: int = 1024**3
    stalled_after_s: float = 60.0


class Uploads:
    """Receives jobs; `wake` tells the planner of them."""

    def __init__(
        self,
        store: Store,
        wake: Callable[[str], None],
        served_model: str | None,
        limits: UploadLimits,
    ) -> None:
        self._store = store
        self._wake = wake
        self._served_model = served_model
        self._limits = limits
        self._places = asyncio.Semaphore(UPLOADS_AT_ONCE)

    async def receive(self, request: Request) -> tuple[int, JsonObject]:
        """The status and the body of the answer to `POST /v1/jobs`; raises RefusedRequestError."""
        self._check_headers(request)
        new_job = self._new_job(request)
        async with (
            self._places,
            contextmanager_in_threadpool(self._store.submission(new_job)) as submission,
        ):
            if not submission.existing:
                await self._add_rows(request, submission)
        payload: JsonObject = {}
        if not submission.existing:
            payload = {"accepted": submission.accepted, "rejected": submission.rejected}
            payload["warning"] = await run_in_threadpool(self.try_to_wake, submission.job_id)
        job = await run_in_threadpool(self._store.job, submission.job_id)
        return (200 if submission.existing else 201), job_payload(job) | payload

    async def _add_rows(self, request: Request, submission: Submission) -> None:
        reader = BatchReader()
        async for piece in self._pieces(request):
            await run_in_threadpool(_parse_and_add, submission, reader, piece)
        await run_in_threadpool(lambda: submission.add(reader.last_rows()))

    async def _pieces(self, request: Request) -> AsyncIterator[bytes]:
        """The body in pieces worth a trip to a thread."""
        piece = bytearray()
        async for chunk in read_body(request, self._limits):
            piece += chunk
            if len(piece) >= PARSE_BYTES:
                yield bytes(piece)
                piece.clear()
        yield bytes(piece)

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
            raise _too_large(self._limits)

    def _new_job(self, request: Request) -> NewJob:
        query = request.query_params
        model = query.get("model") or self._served_model
        if not model or not _is_text(model, 512):
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
        if key is not None and not _is_text(key, 255):
            message = "must have 1 to 255 characters"
            raise RefusedRequestError(400, "invalid_idempotency_key", message, "Idempotency-Key")
        window_s = parse_window(query.get("completion_window"))
        priority = parse_priority(query.get("priority"))
        return NewJob(model, key, parse_metadata(query.get("metadata")), window_s, priority)

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


async def read_body(request: Request, limits: UploadLimits) -> AsyncIterator[bytes]:
    """The body as it arrives; raises RefusedRequestError when it is too long, stalls or breaks."""
    received = 0
    stream = aiter(request.stream())
    try:
        while True:
            async with asyncio.timeout(limits.stalled_after_s):
                chunk = await anext(stream, None)
            if chunk is None:
                return
            received += len(chunk)
            if received > limits.max_bytes:
                raise _too_large(limits)
            yield chunk
    except TimeoutError as error:
        raise RefusedRequestError(
            408, "upload_stalled", "the upload stalled; send it again"
        ) from error
    except ClientDisconnect as error:
        raise RefusedRequestError(400, "upload_broken_off", "the upload broke off") from error


def _too_large(limits: UploadLimits) -> RefusedRequestError:
    message = f"the upload is longer than {limits.max_bytes} bytes; split it into several jobs"
    return RefusedRequestError(413, "upload_too_large", message)


def _parse_and_add(submission: Submission, reader: BatchReader, piece: bytes) -> None:
    submission.add(reader.rows(piece))


def parse_metadata(text: str | None) -> dict[str, str]:
    """The pairs of `?metadata={"key":"value"}`; raises RefusedRequestError."""
    if text is None:
        return {}
    try:
        pairs = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad_metadata("is not JSON") from error
    if not isinstance(pairs, dict) or len(pairs) > MAX_METADATA_PAIRS:
        raise _bad_metadata(f"must be a JSON object of at most {MAX_METADATA_PAIRS} pairs")
    for key, value in pairs.items():
        if not _is_text(key, MAX_METADATA_KEY) or not _is_text(value, MAX_METADATA_VALUE):
            raise _bad_metadata(
                f"keys are texts of at most {MAX_METADATA_KEY} characters, values of at most "
                f"{MAX_METADATA_VALUE}"
            )
    return pairs


def parse_window(text: str | None) -> float | None:
    """The seconds of `?completion_window=24h`; raises RefusedRequestError."""
    if text is None:
        return None
    number, unit = text[:-1], _UNITS_S.get(text[-1:])
    if unit is None or not (number.isascii() and number.isdecimal()) or len(number) > 9:
        message = 'is no span of time: write a whole number of "s", "m", "h" or "d", such as 24h'
        raise RefusedRequestError(400, "invalid_completion_window", message, "completion_window")
    seconds = int(number) * unit
    if not 0 < seconds <= MAX_WINDOW_S:
        message = f"must be more than nothing and at most {MAX_WINDOW_S // _UNITS_S['d']} days"
        raise RefusedRequestError(400, "invalid_completion_window", message, "completion_window")
    return float(seconds)


def parse_priority(text: str | None) -> int:
    """The number of `?priority=`, 0 unless given; raises RefusedRequestError."""
    if text is None:
        return 0
    if text not in _PRIORITIES:
        message = f"must be a whole number from 0 to {MAX_PRIORITY}; larger ones go first"
        raise RefusedRequestError(400, "invalid_priority", message, "priority")
    return int(text)


def _bad_metadata(message: str) -> RefusedRequestError:
    return RefusedRequestError(400, "invalid_metadata", message, "metadata")


def _is_text(value: object, longest: int) -> bool:
    """Whether it is a text, not empty, that both databases can store."""
    if not isinstance(value, str) or not 0 < len(value) <= longest or "\x00" in value:
        return False
    return value.encode(errors="replace").decode() == value
