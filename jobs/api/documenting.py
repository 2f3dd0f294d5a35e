"""Describes routes in the OpenAPI document.

A route names its answer's type as `response_model` and passes `documented(...)` as `responses`. It
returns a Response itself, so FastAPI only describes the answer and does not copy it.
"""

import json
from types import ModuleType
from typing import Annotated, Any

from fastapi import Path
from fastapi.responses import StreamingResponse
from pydantic import ConfigDict
from typing_extensions import is_typeddict

from nightjar.jobs.api.schemas import ErrorAnswer
from nightjar.jobs.lines.error_shape import error_payload

EXAMPLE = "x-example"
"""Where an example waits as JSON text: FastAPI would drop what is null in it."""

Responses = dict[int | str, dict[str, Any]]

JobId = Annotated[str, Path(description="The id of a job.", examples=["job_019a8f0e6c1b2d"])]

ScheduleName = Annotated[
    str, Path(description="The name of a schedule, or its id.", examples=["rank"])
]

# By status: what it means, and the code and message of an example.
_ERRORS: dict[int, tuple[str, str, str]] = {
    400: (
        "A parameter or the body cannot be used; `param` names it.",
        "invalid_parameter",
        "limit: Input should be greater than or equal to 1",
    ),
    401: ("No key, or one that is not valid.", "invalid_api_key", "this key is not known"),
    403: (
        "The key's scope is too small, or a page of another origin makes the call.",
        "scope_too_small",
        "this call needs a key of the scope 'submit'",
    ),
    404: (
        "There is no such thing, or it belongs to somebody else.",
        "unknown_job",
        "there is no job 'job_019a8f0e6c1b2d'",
    ),
    408: ("The body came too slowly.", "upload_stalled", "the upload stalled; send it again"),
    409: (
        "The state of the thing does not allow it.",
        "wrong_state",
        "job job_019a8f0e6c1b2d is cancelled: nothing of it can be retried",
    ),
    410: (
        "The requests and results of the job were purged; its counts are still shown.",
        "results_purged",
        "the requests and results of job 'job_019a8f0e6c1b2d' were purged at "
        "2026-11-23T02:00:00+00:00; its counts and usage are still shown",
    ),
    413: (
        "The body is too large.",
        "upload_too_large",
        "the upload is longer than 1073741824 bytes; split it into several jobs",
    ),
    429: (
        "A limit of the tenant or of the API is reached: send it again after `Retry-After`.",
        "rate_limit_exceeded",
        "this tenant may make 60 requests a minute; send it again in 3 s",
    ),
    504: (
        "There was no answer in time, and the call was cancelled.",
        "timeout",
        "no answer came within 600 s; the call is cancelled",
    ),
    415: (
        "The body is of a type that is not taken.",
        "unsupported_content_type",
        "send the batch lines themselves, as application/jsonl",
    ),
    421: (
        "The `Host` is none of the deployment's names.",
        "untrusted_host",
        "the host 'other.example' is not known here; add it to NIGHTJAR_TRUSTED_HOSTS, or call "
        "the API by its address",
    ),
    500: (
        "A fault of Nightjar.",
        "internal_error",
        "a fault of Nightjar; the API's log says more",
    ),
    503: (
        "The database or a process is away: send it again later.",
        "database_unavailable",
        "the database is not available; the API's log says why",
    ),
}


def describe_late(*modules: ModuleType) -> None:
    """Let pydantic look through these modules' types when the document is asked for.

    FastAPI would do so for each route as an application is made, half the time that this takes.
    """
    for module in modules:
        for kind in vars(module).values():
            if is_typeddict(kind):
                kind.__pydantic_config__ = ConfigDict(defer_build=True)


def example_content(example: object, media: str = "application/json") -> dict[str, Any]:
    """The `content` of a body or an answer, with an example."""
    return {media: {EXAMPLE: json.dumps(example)}}


def reference(kind: type) -> dict[str, str]:
    """A reference to the schema of a type that `openapi.py` adds to the document."""
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def errors(*statuses: int) -> Responses:
    """The errors that a route may answer, with an example each."""
    found: Responses = {}
    for status in statuses:
        description, code, message = _ERRORS[status]
        content = example_content(error_payload(status, code, message))
        # By reference: FastAPI would give a `model` the media type of the route's own answer.
        content["application/json"]["schema"] = reference(ErrorAnswer)
        found[status] = {"description": description, "content": content}
    return found


EVERYWHERE = errors(401, 403, 421, 429, 500, 503)
"""What every route under /v1 may answer."""


def documented(
    example: object, *statuses: int, status: int = 200, again: type | None = None
) -> Responses:
    """An example of the answer, and the errors of a route beside those of EVERYWHERE.

    `status` is that of the answer. `again` is the type of the same answer with status 200, where
    the thing was there before.
    """
    content = example_content(example)
    found: Responses = {status: {"content": content}, **errors(*statuses)}
    if again is not None:
        known = {"model": again, "description": "It was there before.", "content": content}
        found[200] = known
    return found


def call_documented(example: object, *statuses: int, stream: str | None = None) -> Responses:
    """The same for a single call, whose answer may be a stream, and names its job in a header."""
    found = documented(example, *statuses)
    if stream is not None:
        found[200]["content"] |= example_content(stream, "text/event-stream")
        found[200]["content"]["text/event-stream"]["schema"] = {
            "description": "Server-sent events, `data: [DONE]` at the end; see `stream`.",
        }
    found[200]["headers"] = {
        "X-Request-Id": {
            "description": "The id of the call's job.",
            "required": True,
            "schema": {"type": "string"},
        }
    }
    return found


class JsonLines(StreamingResponse):
    """JSON lines, as they are read."""

    media_type = "application/jsonl"


def lines_documented(example: str, *statuses: int) -> Responses:
    """The same for an answer of JSON lines, which says in a header whether the job is over."""
    complete = {
        "description": "`true` where the job is over, so that these lines are all.",
        "required": True,
        "schema": {"type": "string", "enum": ["true", "false"]},
    }
    state = {
        "description": "The state of the job.",
        "required": True,
        "schema": {"type": "string"},
    }
    content = example_content(example, JsonLines.media_type)
    headers = {"Nightjar-Job-Complete": complete, "Nightjar-Job-State": state}
    return {200: {"content": content, "headers": headers}, **errors(*statuses)}
