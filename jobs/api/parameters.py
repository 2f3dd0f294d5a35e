"""The parameters of `POST /v1/jobs`, read from its query."""

import json

from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.purge_records import LEAST_KEPT_S
from nightjar.jobs.records import JsonObject, is_text

MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY = 64  # characters
MAX_METADATA_VALUE = 512
METADATA_SCHEMA: JsonObject = {
    "type": "object",
    "propertyNames": {"minLength": 1, "maxLength": MAX_METADATA_KEY},
    "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
    "maxProperties": MAX_METADATA_PAIRS,
}
MAX_PRIORITY = 9
_PRIORITIES = frozenset(map(str, range(MAX_PRIORITY + 1)))
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
MAX_WINDOW_S = 365 * _UNITS_S["d"]


def parse_metadata(text: str | None) -> dict[str, str]:
    """The pairs of `?metadata={"key":"value"}`; raises RefusedRequestError."""
    if text is None:
        return {}
    try:
        pairs = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad_metadata("is not JSON") from error
    return check_metadata(pairs)


def check_metadata(pairs: object) -> dict[str, str]:
    """The pairs, if a job may carry them; raises RefusedRequestError."""
    if not isinstance(pairs, dict) or len(pairs) > MAX_METADATA_PAIRS:
        raise _bad_metadata(f"must be a JSON object of at most {MAX_METADATA_PAIRS} pairs")
    for key, value in pairs.items():
        is_value = value == "" or is_text(value, MAX_METADATA_VALUE)
        if not is_text(key, MAX_METADATA_KEY) or not is_value:
            raise _bad_metadata(
                f"keys are texts of 1 to {MAX_METADATA_KEY} characters, values of at most "
                f"{MAX_METADATA_VALUE}"
            )
    return pairs


def parse_window(text: str | None) -> float | None:
    """The seconds of `?completion_window=24h`; raises RefusedRequestError."""
    least = "more than nothing"
    seconds = _parse_span("completion_window", text, 1, least)
    return None if seconds is None else float(seconds)


def parse_keep_results(text: str | None) -> int | None:
    """The seconds of `?keep_results=7d`; raises RefusedRequestError."""
    return _parse_span("keep_results", text, LEAST_KEPT_S, "at least 1 hour")


def _parse_span(name: str, text: str | None, least_s: int, least: str) -> int | None:
    if text is None:
        return None
    number, unit = text[:-1], _UNITS_S.get(text[-1:])
    if unit is None or not (number.isascii() and number.isdecimal()) or len(number) > 9:
        message = 'is no span of time: write a whole number of "s", "m", "h" or "d", such as 24h'
        raise RefusedRequestError(400, f"invalid_{name}", message, name)
    seconds = int(number) * unit
    if not least_s <= seconds <= MAX_WINDOW_S:
        message = f"must be {least} and at most {MAX_WINDOW_S // _UNITS_S['d']} days"
        raise RefusedRequestError(400, f"invalid_{name}", message, name)
    return seconds


def parse_priority(text: str | None) -> int:
    """The number of `?priority=`, 0 unless given; raises RefusedRequestError."""
    if text is None:
        return 0
    if text not in _PRIORITIES:
        message = f"must be a whole number from 0 to {MAX_PRIORITY}; larger ones go first"
        raise RefusedRequestError(400, "invalid_priority", message, "priority")
    return int(text)


def parse_idempotency_key(text: str | None) -> str | None:
    """The value of the header `Idempotency-Key`, if it came; raises RefusedRequestError."""
    if text is not None and not is_text(text, 255):
        message = "must have 1 to 255 characters"
        raise RefusedRequestError(400, "invalid_idempotency_key", message, "Idempotency-Key")
    return text


def parse_flag(name: str, text: str | None) -> bool:
    """The value of `?NAME=true`, false unless given; raises RefusedRequestError."""
    if text not in (None, "true", "false"):
        raise RefusedRequestError(400, f"invalid_{name}", "must be true or false", name)
    return text == "true"


def _bad_metadata(message: str) -> RefusedRequestError:
    return RefusedRequestError(400, "invalid_metadata", message, "metadata")
