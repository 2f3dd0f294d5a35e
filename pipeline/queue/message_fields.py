"""The fields that a message of Nightjar may have, each with the check of its type and size."""

import re
from collections.abc import Callable
from datetime import datetime

from nightjar.jobs.tracing import is_traceparent

Check = Callable[[object], bool]

LARGEST_TASK_BYTES = 64 << 10
"""The largest message of a task, as it lies in the broker; Nightjar's have about 1 kB."""

SIGNATURE = "nightjar_signature"
"""The header that carries the signature."""

# Questions that remote control may ask of a worker. Flower asks them, and they change nothing.
_QUESTIONS = (
    "active",
    "active_queues",
    "clock",
    "conf",
    "enable_events",
    "ping",
    "query_task",
    "registered",
    "report",
    "reserved",
    "revoked",
    "scheduled",
    "stats",
)
_LARGEST_INTEGER = 1 << 63
_TASKS = "nightjar."
_YEARS = range(2000, 3000)
_LONGEST_NAME = 255
_LONGEST_REPR = 4096


def _text(longest: int) -> Check:
    # Printable, because it is logged; half of a surrogate pair cannot be.
    return lambda value: (
        isinstance(value, str) and 0 < len(value) <= longest and value.isprintable()
    )


def _maybe_text(longest: int) -> Check:
    check = _text(longest)
    return lambda value: value is None or value == "" or check(value)


def _one_of(*allowed: object) -> Check:
    # The type counts, too: JSON's true equals 1.
    return lambda value: any(type(value) is type(one) and value == one for one in allowed)


def _integer(least: int, most: int) -> Check:
    return lambda value: type(value) is int and least <= value <= most


def _number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST_INTEGER  # type: ignore[arg-type]


def _object(value: object) -> bool:
    return isinstance(value, dict)


def is_plain(value: object) -> bool:
    """Whether a task or a question may have this as an argument."""
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, str):
        return len(value) <= LARGEST_TASK_BYTES
    return _number(value)


def _task_name(value: object) -> bool:
    # Celery's own tasks call other tasks by name.
    return isinstance(value, str) and value.startswith(_TASKS) and len(value) <= _LONGEST_NAME


def _moment(value: object) -> bool:
    """Whether this is None, or a moment with a time zone that can be compared with now."""
    if value is None:
        return True
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return False
    return moment is not None and moment.tzinfo is not None and moment.year in _YEARS


def _signature(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _names(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(map(_text(_LONGEST_NAME), value)))


def _plain_values(value: object) -> bool:
    return value is None or (isinstance(value, dict) and all(map(is_plain, value.values())))


def _reply_address(value: object) -> bool:
    return value is None or (
        isinstance(value, dict)
        and value.keys() == {"exchange", "routing_key"}
        and value["exchange"] == "reply.celery.pidbox"
        and _text(_LONGEST_NAME)(value["routing_key"])
    )


_nothing = _one_of(None)
_name, _maybe_name = _text(_LONGEST_NAME), _maybe_text(_LONGEST_NAME)
ENVELOPE: dict[str, Check] = {
    "body": lambda value: isinstance(value, str),
    "content-encoding": _one_of("utf-8"),
    "content-type": _one_of("application/json"),
    "headers": _object,
    "properties": _object,
}
PROPERTIES: dict[str, Check] = {
    "correlation_id": _maybe_name,
    "reply_to": _maybe_name,
    "argsrepr": _maybe_text(_LONGEST_REPR),
    "kwargsrepr": _maybe_text(_LONGEST_REPR),
    "delivery_mode": _integer(1, 2),
    "delivery_info": _object,
    "priority": _integer(0, 9),
    "body_encoding": _one_of("base64"),
    "delivery_tag": _name,
    "expiration": _maybe_name,
}
DELIVERY_INFO: dict[str, Check] = {
    "exchange": _maybe_name,
    "routing_key": _maybe_name,
    "redelivered": _one_of(True, False),
}
TASK_HEADERS: dict[str, Check] = {
    "lang": _one_of("py"),
    "task": _task_name,
    "id": _name,
    "shadow": _maybe_name,
    "eta": _nothing,
    "expires": _moment,
    "group": _nothing,
    "group_index": _nothing,
    "retries": _integer(0, 1000),
    "timelimit": _one_of([None, None]),
    "root_id": _maybe_name,
    "parent_id": _maybe_name,
    "argsrepr": _maybe_text(_LONGEST_REPR),
    "kwargsrepr": _maybe_text(_LONGEST_REPR),
    "origin": _maybe_name,
    "ignore_result": _one_of(None, True, False),
    "replaced_task_nesting": _integer(0, 0),
    "stamped_headers": _one_of(None, []),
    "stamps": _one_of({}),
    "celery_beat_task": _one_of(True),  # in messages of the clock
    "redelivered": _one_of(True, False),  # kombu adds it to what it delivers again
    "traceparent": is_traceparent,  # of calls that are traced
    SIGNATURE: _signature,
}
OPTIONS: dict[str, Check] = dict.fromkeys(("callbacks", "errbacks", "chain", "chord"), _nothing)
QUESTION_HEADERS: dict[str, Check] = {
    "clock": _integer(0, _LARGEST_INTEGER),
    "expires": _number,
    SIGNATURE: _signature,
}
QUESTION: dict[str, Check] = {
    "method": _one_of(*_QUESTIONS),
    "arguments": _plain_values,
    "destination": _names,
    "pattern": _maybe_name,
    "matcher": _one_of(None, "glob"),  # no regular expression: one may take for ever
    "ticket": _maybe_name,
    "reply_to": _reply_address,
}
