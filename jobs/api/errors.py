"""Errors as answers, in OpenAI's shape."""

import logging
import math

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException

from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.health import public_message
from nightjar.jobs.errors import (
    AppendPlaceError,
    DuplicateScheduleError,
    EmptyJobError,
    FileInUseError,
    JobError,
    LifecycleError,
    LostUploadError,
    ModelNameError,
    PurgedJobError,
    QuotaError,
    ReusedKeyError,
    StoreError,
    StoreUnavailableError,
    TooManyRejectedError,
    TooManyRowsError,
    TooManySchedulesError,
    TooManyWebhooksError,
    UnknownBatchError,
    UnknownDeliveryError,
    UnknownFileError,
    UnknownJobError,
    UnknownScheduleError,
    UnknownWebhookError,
)
from nightjar.jobs.lines.error_shape import error_payload

logger = logging.getLogger(__name__)


def error_answer(status: int, code: str, message: str, param: str | None = None) -> JSONResponse:
    """An error as an HTTP answer."""
    return JSONResponse(error_payload(status, code, message, param), status_code=status)


def _quota_answer(error: QuotaError) -> JSONResponse:
    """429; clients of OpenAI's API send it again by themselves only where that may help."""
    answer = error_answer(429, error.code, str(error))
    wait_s = error.retry_after_s
    if wait_s is not None:
        answer.headers["Retry-After"] = str(math.ceil(wait_s))
    answer.headers["x-should-retry"] = str(wait_s is not None and wait_s <= 60).lower()
    return answer


def answer_error(request: Request, error: Exception) -> JSONResponse:
    """A JobError as an HTTP answer in OpenAI's error shape."""
    if isinstance(error, RefusedRequestError):
        answer = error_answer(error.status, error.code, str(error), error.param)
        if error.retry_after_s is not None:
            answer.headers["Retry-After"] = str(error.retry_after_s)
        return answer
    if isinstance(error, QuotaError):
        return _quota_answer(error)
    if isinstance(error, ModelNameError):
        status = 404 if error.code == "model_not_found" else 400
        return error_answer(status, error.code, str(error), error.param)
    status, code = next(
        (answer for kind, answer in _STATUS_CODES if isinstance(error, kind)), (400, "invalid_job")
    )
    message = str(error)
    if status >= 500:
        logger.error("request failed: %s", error, extra={"action": "api_error", "code": code})
    if isinstance(error, StoreError):
        message = public_message(error)
    answer = error_answer(status, code, message)
    if status == 409:
        # To OpenAI's clients a conflict passes by itself, and they would send the call again.
        answer.headers["x-should-retry"] = "false"
    return answer


def answer_bad_parameter(request: Request, error: Exception) -> JSONResponse:
    """A wrong query parameter, without the value that was sent."""
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    param = str(first["loc"][-1])
    return error_answer(400, "invalid_parameter", f"{param}: {first['msg']}", param)


def answer_http_error(request: Request, error: Exception) -> JSONResponse:
    """A path or a method that does not exist, in the same shape."""
    if not isinstance(error, HTTPException):
        raise error
    code = {404: "unknown_path", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
    message = f"{error.detail}; GET /openapi.json lists what there is"
    answer = error_answer(error.status_code, code, message)
    answer.headers.update(error.headers or {})
    if error.status_code == 405:  # the framework names the methods of one route of the path alone
        answer.headers["Allow"] = _allowed_methods(request)
    return answer


def _allowed_methods(request: Request) -> str:
    """The methods of every route of the request's path."""
    path: str = request.scope["path"]
    routes = iter_route_contexts(request.app.routes)
    found = {
        method
        for route in routes
        if route.methods and route.path_regex.match(path)
        for method in route.methods
    }
    return ", ".join(sorted(found))


def answer_fault(request: Request, error: Exception) -> JSONResponse:
    """A fault of Nightjar; the server logs the error itself."""
    return error_answer(500, "internal_error", "a fault of Nightjar; the API's log says more")


# The first that fits counts.
_STATUS_CODES: list[tuple[type[JobError], tuple[int, str]]] = [
    (UnknownJobError, (404, "unknown_job")),
    (PurgedJobError, (410, "results_purged")),
    (UnknownBatchError, (404, "unknown_batch")),
    (UnknownFileError, (404, "unknown_file")),
    (FileInUseError, (409, "file_in_use")),
    (LostUploadError, (503, "upload_lost")),
    (UnknownWebhookError, (404, "unknown_webhook")),
    (UnknownDeliveryError, (404, "unknown_delivery")),
    (TooManyWebhooksError, (409, "too_many_webhooks")),
    (UnknownScheduleError, (404, "unknown_schedule")),
    (DuplicateScheduleError, (409, "schedule_exists")),
    (TooManySchedulesError, (409, "too_many_schedules")),
    (EmptyJobError, (400, "empty_job")),
    (TooManyRowsError, (413, "too_many_rows")),
    (TooManyRejectedError, (400, "too_many_rejected")),
    (ReusedKeyError, (409, "idempotency_key_reused")),
    (AppendPlaceError, (409, "wrong_place")),
    (LifecycleError, (409, "wrong_state")),
    (StoreUnavailableError, (503, "database_unavailable")),
    (StoreError, (500, "store_error")),
]
