"""The log format of every process: one line a record, for people or as JSON.

A record of Nightjar names its event in `extra={"action": ...}`, with the ids that it is about. The
action stays the same when the text changes:

    2026-11-21 03:00:00,120 WARNING nightjar.pipeline.queue.sweeper: worker gpu-1:7:ab is silent: 2
    micro-batches go to others action=release_dead_worker owner="gpu-1:7:ab"

(on one line). With NIGHTJAR_LOG_FORMAT=json, a line is an object with the same fields. Fields must
never hold prompts, answers or secrets. Records of libraries have no action and are written without
fields, because their fields may hold anything.

NIGHTJAR_LOG_LEVEL is the level of Nightjar's own records. Libraries write from INFO on, always:
their debug records repeat what they send and read.

This module reads the two variables itself, because compute processes have no settings.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType

Fields = MappingProxyType[str, object]

OURS = "nightjar"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_LONGEST = 200  # characters of a value
_LONGEST_TEXT = 16_384  # characters of a message or a traceback in JSON
_about: ContextVar[Fields] = ContextVar("about", default=MappingProxyType({}))
_process: dict[str, str] = {}


@contextmanager
def about(**fields: object) -> Iterator[None]:
    """Add these fields to every record of Nightjar that this thread writes inside the block."""
    token = _about.set(MappingProxyType({**_about.get(), **fields}))
    try:
        yield
    finally:
        _about.reset(token)


def name_process(name: str, **fields: str) -> None:
    """Say what this process is; `fields`, such as its worker's name, go with each record."""
    _process.update({"process": name, **fields})


class FieldsFormatter(logging.Formatter):
    """Appends the fields of a record that has an `action`, as name=value, the action first."""

    def __init__(self, process: str | None = None) -> None:
        """process: the name at the start of lines, where several processes write one log."""
        said_by = "" if process is None else f"{process} "
        super().__init__(f"%(asctime)s {said_by}%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line without its traceback."""
        line = super().formatMessage(record)
        fields = _fields(record)
        return " ".join([line, *(f"{name}={_shown(value)}" for name, value in fields.items())])


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object: time, level, logger, process, pid, message, fields."""

    def __init__(self, process: str | None = None) -> None:
        """process: the kind of this process, unless `name_process` says it."""
        super().__init__()
        self._said_by = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the object on one line; `error` holds the traceback."""
        said: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._said_by or "nightjar",
            **_process,
            "pid": record.process,
            "message": record.getMessage()[:_LONGEST_TEXT],
        }
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)[-_LONGEST_TEXT:]
        fields = {name: _cut(value) for name, value in _fields(record).items() if name not in said}
        return json.dumps(said | fields, ensure_ascii=False, default=str)


def is_json() -> bool:
    """Whether NIGHTJAR_LOG_FORMAT asks for JSON."""
    return os.environ.get("NIGHTJAR_LOG_FORMAT") == "json"


def make_formatter(process: str | None = None) -> logging.Formatter:
    """Return the formatter that NIGHTJAR_LOG_FORMAT asks for."""
    if is_json():
        return JsonFormatter(process)
    return FieldsFormatter(process)


def configure(process: str | None = None) -> None:
    """Write this process's records to standard error, in the format that is asked for."""
    handler = logging.StreamHandler()
    handler.setFormatter(make_formatter(process))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    set_level()


def set_level() -> None:
    """Give Nightjar's own records the level of NIGHTJAR_LOG_LEVEL."""
    level = _LEVELS.get(os.environ.get("NIGHTJAR_LOG_LEVEL", ""), logging.INFO)
    logging.getLogger(OURS).setLevel(level)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the action and the fields of a record of Nightjar; of other records nothing."""
    action = getattr(record, "action", None)
    if action is None:
        return {}
    given = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
    return {"action": action} | dict(_about.get()) | given


def _cut(value: object) -> object:
    """Return a value of JSON whose text is not too long."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value[:_LONGEST]
    text = json.dumps(value, ensure_ascii=False, default=str)
    return value if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _shown(value: object) -> str:
    """Return a value on one line: plain words as they are, all else as JSON."""
    if isinstance(value, str) and value and _PLAIN.issuperset(value):
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
