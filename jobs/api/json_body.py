"""A request's body that is one JSON object, read in bounded memory."""

import json

from fastapi import Request

from nightjar.jobs.api.body import RefusedRequestError, UploadLimits, read_body
from nightjar.jobs.records import JsonObject


async def read_small_body(request: Request, limits: UploadLimits, max_bytes: int) -> bytes:
    """The body of a request, in memory whole.

    Raises:
        RefusedRequestError: It is too long, too slow, broken off or compressed.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        message = "compressed bodies are not taken; send the JSON as it is"
        raise RefusedRequestError(415, "unsupported_encoding", message, "Content-Encoding")
    raw = bytearray()
    async for chunk in read_body(request, limits):
        raw += chunk
        if len(raw) > max_bytes:
            message = f"the body is longer than {max_bytes} bytes; send less"
            raise RefusedRequestError(413, "body_too_large", message)
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
        data = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8 (byte {error.start + 1}); encode it as UTF-8"
        raise RefusedRequestError(400, "invalid_encoding", message) from error
    except json.JSONDecodeError as error:
        message = f"the body is broken JSON at line {error.lineno}, column {error.colno}: "
        raise RefusedRequestError(400, "invalid_json", message + error.msg) from error
    except RecursionError as error:
        message = "the body is nested too deeply; flatten it"
        raise RefusedRequestError(400, "invalid_json", message) from error
    except ValueError as error:  # integers of thousands of digits
        message = "the body holds a number with too many digits; shorten it"
        raise RefusedRequestError(400, "invalid_json", message) from error
    if not isinstance(data, dict):
        message = "the body is not a JSON object; write {...}"
        raise RefusedRequestError(400, "invalid_json", message)
    return data
