"""The log format of every process: one line a record, with the fields after the text.

A record of Nightjar names its event in `extra={"action": ...}`, with the ids that it is about. The
action stays the same when the text changes:

    2026-11-21 03:00:00,120 WARNING nightjar.pipeline.queue.sweeper: worker gpu-1:7:ab is silent: 2
    micro-batches go to others action=release_dead_worker owner="gpu-1:7:ab"

(on one line). Fields must never hold prompts, answers or secrets. Records of libraries have no
action and are written without fields, because their fields may hold anything.
"""

import json
import logging

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_LONGEST = 200  # characters of a value


class FieldsFormatter(logging.Formatter):
    """Appends the fields of a record that has an `action`, as name=value, the action first."""

    def __init__(self, process: str | None = None) -> None:
        """process: the name at the start of lines, where several processes write one log."""
        said_by = "" if process is None else f"{process} "
        super().__init__(f"%(asctime)s {said_by}%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line without its traceback."""
        line = super().formatMessage(record)
        action = getattr(record, "action", None)
        if action is None:
            return line
        fields = {"action": action} | {
            name: value for name, value in record.__dict__.items() if name not in _STANDARD
        }
        return " ".join([line, *(f"{name}={_shown(value)}" for name, value in fields.items())])


def configure(process: str | None = None) -> None:
    """Write this process's records, from INFO on, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(FieldsFormatter(process))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _shown(value: object) -> str:
    """Return a value on one line: plain words as they are, all else as JSON."""
    if isinstance(value, str) and value and _PLAIN.issuperset(value):
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
