"""Errors as answers, in OpenAI's shape."""

import logging

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.health import public_message
from nightjar.jobs.api.payloads import error_payload
from nightjar.jobs.errors import (
    EmptyJobError,
    JobError,
    LifecycleError,
    ReusedKeyError,
    StoreError,
    StoreUnavailableError,
    TooManyRejectedError,
    TooManyRowsError,
    TooManyWebhooksError,
    UnknownDeliveryError,
    UnknownJobError,
    UnknownWebhookError,
)

logger = logging.getLogger(__name__)


def error_answer(status: int, code: str, message: str, param: str | None = None) -> JSONResponse:
    """An error as an HTTP answer."""
    return JSONResponse(error_payload(status, code, message, param), status_code=status)


def answer_error(request: Request, error: Exception) -> JSONResponse:
    """A JobError as an HTTP answer in OpenAI's error shape."""
    if isinstance(error, RefusedRequestError):
        return error_answer(error.status, error.code, str(error), error.param)
    status, code = next(
        (answer for kind, answer in _STATUS_CODES if isinstance(error, kind)), (400, "invalid_job")
    )
    message = str(error)
    if status >= 500:
        logger.error("request failed: %s", error, extra={"action": "api_error", "code": code})
    if isinstance(error, StoreError):
        message = public_message(error)
    return error_answer(status, code, message)


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
    return answer


def answer_fault(request: Request, error: Exception) -> JSONResponse:
    """A fault of Nightjar; the server logs the error itself."""
    return error_answer(500, "internal_error", "a fault of Nightjar; the API's log says more")


# The first that fits counts.
_STATUS_CODES: list[tuple[type[JobError], tuple[int, str]]] = [
    (UnknownJobError, (404, "unknown_job")),
    (UnknownWebhookError, (404, "unknown_webhook")),
    (UnknownDeliveryError, (404, "unknown_delivery")),
    (TooManyWebhooksError, (409, "too_many_webhooks")),
    (EmptyJobError, (400, "empty_job")),
    (TooManyRowsError, (413, "too_many_rows")),
    (TooManyRejectedError, (400, "too_many_rejected")),
    (ReusedKeyError, (409, "idempotency_key_reused")),
    (LifecycleError, (409, "wrong_state")),
    (StoreUnavailableError, (503, "database_unavailable")),
    (StoreError, (500, "store_error")),
]
