"""Errors in the shape of OpenAI's API: in answers of the API, and in lines of error files."""

from nightjar.jobs.records import JsonObject

# The `type` of an error in OpenAI's API, by its status.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_payload(status: int, code: str, message: str, param: str | None = None) -> JsonObject:
    """An error in OpenAI's shape."""
    other = "server_error" if status >= 500 else "invalid_request_error"
    kind = _TYPES.get(status, other)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
