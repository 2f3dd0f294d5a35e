"""A request's body that is one JSON object, read in bounded memory."""

from fastapi import Request

from nightjar.jobs.api.body import (
    RefusedRequestError,
    UploadLimits,
    announced_bytes,
    read_body,
    refuse_compressed,
)
from nightjar.jobs.lines.parsing import BodyError, read_object
from nightjar.jobs.records import JsonObject


async def read_small_body(request: Request, limits: UploadLimits, max_bytes: int) -> bytes:
    """The body of a request, in memory whole.

    Raises:
        RefusedRequestError: It is too long, too slow, broken off or compressed.
    """
    refuse_compressed(request.headers, "the JSON")
    too_large = RefusedRequestError(
        413, "body_too_large", f"the body is longer than {max_bytes} bytes; send less"
    )
    if announced_bytes(request.headers) > max_bytes:
        raise too_large
    raw = bytearray()
    async for chunk in read_body(request, limits):
        raw += chunk
        if len(raw) > max_bytes:
            raise too_large
    return bytes(raw)


async def read_json_object(request: Request, limits: UploadLimits, max_bytes: int) -> JsonObject:
    """The object in the body of a request.

    Args:
        request: Its body has not been read.
        limits: How slowly it may come.
        max_bytes: How long it may be.

    Raises:
        RefusedRequestError: It is too long, too slow, compressed, not UTF-8, or no JSON object.
    """
    raw = await read_small_body(request, limits, max_bytes)
    try:
        return read_object(raw)
    except BodyError as error:
        raise RefusedRequestError(400, error.code, f"the body {error.message}") from None
