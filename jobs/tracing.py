"""The trace that this thread works for, as the W3C's `traceparent`; None for most work."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_current: ContextVar[str | None] = ContextVar("traceparent", default=None)


def is_traceparent(value: object) -> bool:
    """Whether a value is a traceparent of version 00, with ids that are not zero."""
    return isinstance(value, str) and _TRACEPARENT.fullmatch(value) is not None


def current_traceparent() -> str | None:
    """Return the trace of this thread or task, which new jobs and messages carry on."""
    return _current.get()


@contextmanager
def in_trace(traceparent: str | None) -> Iterator[None]:
    """Work for this trace inside the block."""
    token = _current.set(traceparent)
    try:
        yield
    finally:
        _current.reset(token)
