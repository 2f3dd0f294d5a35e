"""JSON objects as text, the way the database stores them."""

from collections.abc import Iterable, Mapping
from math import isfinite
from types import NoneType

import msgspec

from nightjar.jobs.errors import StoreError
from nightjar.jobs.records import JsonObject

_ALWAYS_FINITE = frozenset({str, int, bool, NoneType})


def dump_json(value: JsonObject | Mapping[str, str]) -> str:
    """Write compact JSON; raises StoreError for what JSON cannot hold, such as NaN."""
    if not _is_finite(value.values()):  # msgspec would write null
        raise StoreError("a body cannot be written as JSON: it holds a number that is not finite")
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"a body cannot be written as JSON: {error}") from error


def load_json(text: str | bytes) -> JsonObject:
    """Read what `dump_json` wrote."""
    value: JsonObject = msgspec.json.decode(text)
    return value


def _is_finite(values: Iterable[object]) -> bool:
    """Whether no number in these values of JSON is NaN or infinite."""
    for value in values:
        # By type, not by isinstance: this loop runs over every value of every body.
        kind = type(value)
        if kind in _ALWAYS_FINITE:
            continue
        if kind is float:
            if not isfinite(value):  # type: ignore[arg-type]
                return False
        elif kind is dict or kind is list or kind is tuple:
            inner = value.values() if kind is dict else value  # type: ignore[attr-defined]
            if inner and not _is_finite(inner):  # type: ignore[arg-type]
                return False
    return True
