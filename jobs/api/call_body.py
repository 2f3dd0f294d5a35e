"""The body of a single call: read within limits, checked as the body of a batch line is."""

from dataclasses import dataclass

from fastapi import Request
from starlette.datastructures import Headers

from nightjar.jobs.api.body import (
    RefusedRequestError,
    UploadLimits,
    announced_bytes,
    read_body,
    refuse_compressed,
)
from nightjar.jobs.lines.parsing import (
    CHAT_URL,
    MAX_LINE_BYTES,
    URLS,
    BodyError,
    read_object,
    validate_body,
)
from nightjar.jobs.records import JsonObject
from nightjar.jobs.states import RequestKind

# All bodies together that are being read; one that would need more is refused.
MOST_BYTES = 64 * 1024 * 1024
BUSY_AGAIN_S = 1
CONTENT_TYPES = frozenset(
    {
        "",
        "application/json",
        "application/octet-stream",
        "text/plain",
        # What curl -d says of anything. A browser's form has an Origin: see guard.py.
        "application/x-www-form-urlencoded",
    }
)
# The status of a refusal; 400 for all others.
STATUSES = {"model_not_found": 404}


@dataclass(frozen=True, slots=True)
class CallBody:
    """What a call asks for.

    stream: Answer with server-sent events; include_usage: and tell the usage in the last of them.
    """

    kind: RequestKind
    body: JsonObject
    stream: bool = False
    include_usage: bool = False


class BodyReader:
    """Reads the bodies of calls, all together in bounded memory."""

    def __init__(self, limits: UploadLimits) -> None:
        self._limits = UploadLimits(
            max_bytes=min(limits.max_bytes, MAX_LINE_BYTES),
            stalled_after_s=limits.stalled_after_s,
            least_bytes_per_s=limits.least_bytes_per_s,
            deadline_s=limits.deadline_s,
        )
        self._held = 0

    async def read(self, request: Request) -> bytes:
        """The whole body; raises RefusedRequestError."""
        self._check_headers(request.headers)
        body = bytearray()
        try:
            async for chunk in read_body(request, self._limits):
                self._held += len(chunk)
                body += chunk
                if self._held > MOST_BYTES:
                    raise busy("too many large requests arrive at once; send it again")
            return bytes(body)
        finally:
            self._held -= len(body)

    def _check_headers(self, headers: Headers) -> None:
        refuse_compressed(headers, "the JSON")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in CONTENT_TYPES:
            raise RefusedRequestError(
                415,
                "unsupported_content_type",
                "send one JSON object, as application/json",
                "Content-Type",
            )
        if announced_bytes(headers) > self._limits.max_bytes:
            raise RefusedRequestError(
                413,
                "body_too_large",
                f"the request is longer than {self._limits.max_bytes} bytes",
            )


def parse_call(raw: bytes, url: str) -> CallBody:
    """What the body of a call to this URL asks for; raises RefusedRequestError.

    A URL is one of those that batch lines name.
    """
    kind = URLS[url]
    try:
        body = read_object(raw)
        if kind is RequestKind.RANK:
            body.pop("priority", None)  # Cohere's: all calls go first
            return CallBody(kind, validate_body(kind, body))
        stream = _flag(body.pop("stream", None), "stream")
        usage = _includes_usage(body.get("stream_options"))
        return CallBody(kind, validate_body(kind, body, chat=url == CHAT_URL), stream, usage)
    except BodyError as error:
        raise refused(error.code, error.message, error.param) from None


def refused(code: str, message: str, param: str | None, status: int = 400) -> RefusedRequestError:
    """The refusal of a body; batch lines name a field `body.<field>`, and here it is the field."""
    field = None if param in (None, "body") else str(param).removeprefix("body.")
    told = message if field is None else f"{field}: {message}"
    if param == "body" or (field is None and param is None and code.startswith("invalid_")):
        told = f"the request {message}"
    return RefusedRequestError(STATUSES.get(code, status), code, told, field)


def busy(message: str) -> RefusedRequestError:
    """The refusal of a call that may be sent again soon."""
    return RefusedRequestError(503, "too_many_calls", message, retry_after_s=BUSY_AGAIN_S)


def _includes_usage(options: object) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise BodyError("invalid_value", "stream_options", "must be an object")
    return _flag(options.get("include_usage"), "stream_options.include_usage")


def _flag(value: object, name: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise BodyError("invalid_value", name, "must be true or false")
    return bool(value)
