"""What a message may look like, and why one is refused before Celery sees it.

Celery and kombu trust the fields of a message. A wrong type in one of them raises in the receive
path, ends the worker, or leaves it alive without taking anything. Every field is therefore checked
by type and size against the lists below; what is not in a list is refused.
"""

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

Check = Callable[[object], bool]

LARGEST_TASK_BYTES = 64 << 10
"""The largest message of a task, as it lies in the broker; ours have about 1 kB."""

LARGEST_OTHER_BYTES = 8 << 20
"""The largest message of events and of Flower's questions and answers."""

SIGNATURE = "nightjar_signature"
"""The header that carries the signature."""

# What may be asked of a worker by remote control: it changes nothing. Flower asks these.
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
_CONTROL = ".pidbox"  # kombu's queues of remote control
_REPLIES = ".reply.celery.pidbox"
_EVENTS = "celeryev"
_MOST_ARGUMENTS = 16
_LARGEST_INTEGER = 1 << 63
_TASKS = "nightjar."


class MessageError(Exception):
    """A message is refused; the text says why and repeats nothing of its content."""


def is_control_queue(queue: str) -> bool:
    """Whether a worker is asked by remote control through this queue."""
    return queue.endswith(_CONTROL) and not queue.endswith(_REPLIES)


def is_task_queue(queue: str) -> bool:
    """Whether the queue carries tasks; all queues do but kombu's own, of events and control."""
    return not queue.endswith(_CONTROL) and not queue.startswith(_EVENTS)


def read_message(raw: bytes | str, queue: str) -> object:
    """Parse what lay in the broker.

    Raises:
        MessageError: It is too large, or no JSON.
    """
    most = LARGEST_TASK_BYTES if is_task_queue(queue) else LARGEST_OTHER_BYTES
    if len(raw) > most:
        raise MessageError(f"it has {len(raw)} bytes; {most} are allowed")
    return _json(raw, "it")


def check_message(message: object, queue: str) -> dict[str, Any]:
    """Return the message if it may be handed to kombu.

    Raises:
        MessageError: It has a field that ours do not have, or one of a wrong type or size.
    """
    envelope = _check_envelope(message)
    if is_task_queue(queue):
        _check_task(envelope, queue)
    elif is_control_queue(queue):
        _check_question(envelope)
    return envelope


def _check_task(envelope: Mapping[str, Any], queue: str) -> None:
    _check_fields("headers", envelope["headers"], _TASK_HEADERS, required=("task", "id"))
    info = envelope["properties"]["delivery_info"]
    if info["routing_key"] != queue or info["exchange"] not in ("", queue):
        raise MessageError("properties.delivery_info names another queue")
    body = _body(envelope)
    if not (isinstance(body, list) and len(body) == 3):  # Celery's protocol 2
        raise MessageError("the body is no list of arguments, keyword arguments and options")
    args, kwargs, options = body
    if not (isinstance(args, list) and len(args) <= _MOST_ARGUMENTS and all(map(_value, args))):
        raise MessageError("the body's arguments are no short list of plain values")
    if not (
        isinstance(kwargs, dict)
        and len(kwargs) <= _MOST_ARGUMENTS
        and all(_value(part) for item in kwargs.items() for part in item)
    ):
        raise MessageError("the body's keyword arguments are no short list of plain values")
    _check_fields("the body's options", options, _OPTIONS)


def _check_question(envelope: Mapping[str, Any]) -> None:
    _check_fields("headers", envelope["headers"], _QUESTION_HEADERS)
    _check_fields("the body", _body(envelope), _QUESTION, required=("method",))


def _check_envelope(message: object) -> dict[str, Any]:
    envelope = _check_fields("message", message, _ENVELOPE, required=tuple(_ENVELOPE))
    properties = envelope["properties"]
    required = ("delivery_tag", "delivery_info", "body_encoding")
    _check_fields("properties", properties, _PROPERTIES, required=required)
    info = properties["delivery_info"]
    _check_fields("delivery_info", info, _DELIVERY_INFO, required=("exchange", "routing_key"))
    if "compression" in envelope["headers"]:
        raise MessageError("it is compressed")
    return envelope


def _body(envelope: Mapping[str, Any]) -> object:
    try:
        raw = base64.b64decode(envelope["body"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise MessageError("the body is no base64") from error
    return _json(raw, "the body")


def _json(raw: bytes | str, what: str) -> object:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:  # a number may be too long, UTF-8 be broken
        raise MessageError(f"{what} is no JSON: {type(error).__name__}") from error


def _check_fields(
    what: str, fields: object, checks: Mapping[str, Check], required: tuple[str, ...] = ()
) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise MessageError(f"{what} is no object")
    for name in required:
        if name not in fields:
            raise MessageError(f"{what}: {name} is missing")
    for name, value in fields.items():
        check = checks.get(name)
        if check is None:
            raise MessageError(f"{what}: Nightjar does not send {name[:40]!a}")
        if not check(value):
            raise MessageError(f"{what}: {name} has a wrong type or size")
    return fields


def _text(longest: int) -> Check:
    # Printable: it is logged, and half a surrogate pair could not be.
    return lambda value: (
        isinstance(value, str) and 0 < len(value) <= longest and value.isprintable()
    )


def _maybe_text(longest: int) -> Check:
    check = _text(longest)
    return lambda value: value is None or value == "" or check(value)


def _one_of(*allowed: object) -> Check:
    # By type too: JSON's true equals 1.
    return lambda value: any(type(value) is type(one) and value == one for one in allowed)


def _integer(least: int, most: int) -> Check:
    return lambda value: type(value) is int and least <= value <= most


def _number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST_INTEGER  # type: ignore[arg-type]


def _object(value: object) -> bool:
    return isinstance(value, dict)


def _value(value: object) -> bool:
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
    """Whether this is None, or a moment with its offset that may be compared with now."""
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
    return value is None or (isinstance(value, dict) and all(map(_value, value.values())))


def _reply_address(value: object) -> bool:
    return value is None or (
        isinstance(value, dict)
        and value.keys() == {"exchange", "routing_key"}
        and value["exchange"] == "reply.celery.pidbox"
        and _text(_LONGEST_NAME)(value["routing_key"])
    )


_YEARS = range(2000, 3000)
_LONGEST_NAME = 255
_LONGEST_REPR = 4096
_nothing = _one_of(None)
_name, _maybe_name = _text(_LONGEST_NAME), _maybe_text(_LONGEST_NAME)
_ENVELOPE: dict[str, Check] = {
    "body": lambda value: isinstance(value, str),
    "content-encoding": _one_of("utf-8"),
    "content-type": _one_of("application/json"),
    "headers": _object,
    "properties": _object,
}
_PROPERTIES: dict[str, Check] = {
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
_DELIVERY_INFO: dict[str, Check] = {
    "exchange": _maybe_name,
    "routing_key": _maybe_name,
    "redelivered": _one_of(True, False),
}
_TASK_HEADERS: dict[str, Check] = {
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
    "celery_beat_task": _one_of(True),  # of what the clock sends
    "redelivered": _one_of(True, False),  # kombu adds it to what it delivers again
    SIGNATURE: _signature,
}
_OPTIONS: dict[str, Check] = dict.fromkeys(("callbacks", "errbacks", "chain", "chord"), _nothing)
_QUESTION_HEADERS: dict[str, Check] = {
    "clock": _integer(0, _LARGEST_INTEGER),
    "expires": _number,
    SIGNATURE: _signature,
}
_QUESTION: dict[str, Check] = {
    "method": _one_of(*_QUESTIONS),
    "arguments": _plain_values,
    "destination": _names,
    "pattern": _maybe_name,
    "matcher": _one_of(None, "glob"),  # no regular expression, which may take for ever
    "ticket": _maybe_name,
    "reply_to": _reply_address,
}
