"""Checks the form of a message, and refuses it before Celery sees it.

Celery and kombu trust the fields of a message. A wrong type in one of them raises in the receive
path, ends the worker, or leaves it alive without taking anything. So every field of a task is
checked by type and size against the lists of `message_fields.py`; any other field is refused.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from nightjar.pipeline.queue.message_fields import (
    DELIVERY_INFO,
    ENVELOPE,
    LARGEST_TASK_BYTES,
    OPTIONS,
    PROPERTIES,
    QUESTION,
    QUESTION_HEADERS,
    TASK_HEADERS,
    Check,
    is_plain,
)

LARGEST_OTHER_BYTES = 8 << 20
"""The largest message of events, and of Flower's questions and their answers."""

_CONTROL = ".pidbox"  # kombu's queues of remote control
_REPLIES = ".reply.celery.pidbox"
_EVENTS = "celeryev"
_MOST_ARGUMENTS = 16


class MessageError(Exception):
    """A message is refused; the error says why and repeats nothing of the message's content."""


def is_control_queue(queue: str) -> bool:
    """Whether the queue carries remote control's questions to workers."""
    return queue.endswith(_CONTROL) and not queue.endswith(_REPLIES)


def is_task_queue(queue: str) -> bool:
    """Whether the queue carries tasks; only kombu's queues of events and control do not."""
    return not queue.endswith(_CONTROL) and not queue.startswith(_EVENTS)


def read_message(raw: bytes | str, queue: str) -> object:
    """Parse a message as the broker held it.

    Raises:
        MessageError: It is too large, or not JSON.
    """
    most = LARGEST_TASK_BYTES if is_task_queue(queue) else LARGEST_OTHER_BYTES
    if len(raw) > most:
        raise MessageError(f"it has {len(raw)} bytes; {most} are allowed")
    return _json(raw, "it")


def check_message(message: object, queue: str) -> dict[str, Any]:
    """Return the message if it may be handed to kombu.

    Raises:
        MessageError: It has an unknown field, or one of a wrong type or size.
    """
    envelope = _check_envelope(message)
    if is_task_queue(queue):
        _check_task(envelope, queue)
    elif is_control_queue(queue):
        _check_question(envelope)
    return envelope


def _check_task(envelope: Mapping[str, Any], queue: str) -> None:
    _check_fields("headers", envelope["headers"], TASK_HEADERS, required=("task", "id"))
    info = envelope["properties"]["delivery_info"]
    if info["routing_key"] != queue or info["exchange"] not in ("", queue):
        raise MessageError("properties.delivery_info names another queue")
    body = _body(envelope)
    if not (isinstance(body, list) and len(body) == 3):  # Celery's protocol 2
        raise MessageError("the body is no list of arguments, keyword arguments and options")
    args, kwargs, options = body
    if not (isinstance(args, list) and len(args) <= _MOST_ARGUMENTS and all(map(is_plain, args))):
        raise MessageError("the body's arguments are no short list of plain values")
    if not (
        isinstance(kwargs, dict)
        and len(kwargs) <= _MOST_ARGUMENTS
        and all(is_plain(part) for item in kwargs.items() for part in item)
    ):
        raise MessageError("the body's keyword arguments are no short list of plain values")
    _check_fields("the body's options", options, OPTIONS)


def _check_question(envelope: Mapping[str, Any]) -> None:
    _check_fields("headers", envelope["headers"], QUESTION_HEADERS)
    _check_fields("the body", _body(envelope), QUESTION, required=("method",))


def _check_envelope(message: object) -> dict[str, Any]:
    envelope = _check_fields("message", message, ENVELOPE, required=tuple(ENVELOPE))
    properties = envelope["properties"]
    required = ("delivery_tag", "delivery_info", "body_encoding")
    _check_fields("properties", properties, PROPERTIES, required=required)
    info = properties["delivery_info"]
    _check_fields("delivery_info", info, DELIVERY_INFO, required=("exchange", "routing_key"))
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
