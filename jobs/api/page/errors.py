"""What goes wrong, as a page."""

import json

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nightjar.jobs.api.errors import (
    answer_bad_parameter,
    answer_error,
    answer_fault,
    answer_http_error,
)
from nightjar.jobs.api.page import rendering

_TITLES = {
    400: "This cannot be shown",
    403: "Not allowed",
    404: "Not found",
    405: "Not found",
    409: "Not possible now",
    410: "Deleted",
    429: "Too many requests",
    500: "Something went wrong",
    503: "Not available",
}


def error_page(request: Request, error: Exception, answer: Response) -> Response:
    """The page that says what the API's answer says."""
    said = json.loads(bytes(answer.body))["error"]["message"]
    if isinstance(error, HTTPException):
        said = "there is no such page"
    status = answer.status_code
    shown = rendering.page(
        request,
        "error.html",
        status,
        title=_TITLES.get(status, "This cannot be shown"),
        message=said,
        job_id=request.path_params.get("job_id") if status == 409 else None,
    )
    if "retry-after" in answer.headers:
        shown.headers["Retry-After"] = answer.headers["retry-after"]
    return shown


def show_error(request: Request, error: Exception) -> Response:
    """A JobError as a page."""
    return error_page(request, error, answer_error(request, error))


def show_bad_parameter(request: Request, error: Exception) -> Response:
    """A wrong parameter as a page."""
    return error_page(request, error, answer_bad_parameter(request, error))


def show_http_error(request: Request, error: Exception) -> Response:
    """An unknown path as a page."""
    return error_page(request, error, answer_http_error(request, error))


def show_fault(request: Request, error: Exception) -> Response:
    """A fault of Nightjar as a page."""
    return error_page(request, error, answer_fault(request, error))
