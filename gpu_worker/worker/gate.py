"""Who may use the compute process now: ordinary work together, or one suspect alone."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class GateClosedError(Exception):
    """The worker ends: nobody comes in any more."""


class Gate:
    """A lock that many share or one holds alone.

    Suspects go first: while one waits, no ordinary work comes in, so that the compute process is
    emptied once for all suspects that wait and not once for each.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = False
        self._waiting = 0  # suspects
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many suspects wait to come in."""
        return self._waiting

    @property
    def inside(self) -> int:
        """How much ordinary work is inside."""
        return self._inside

    def close(self) -> None:
        """Let nobody in any more; who is inside stays as long as it takes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Hold the gate beside others of this kind.

        Raises:
            GateClosedError: It was closed before there was room.
        """
        with self._changed:
            self._wait_for(lambda: not self._alone and not self._waiting)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the gate with nobody beside.

        Raises:
            GateClosedError: It was closed before everybody had left.
        """
        with self._changed:
            self._waiting += 1
            try:
                self._wait_for(lambda: not self._alone and not self._inside)
            finally:
                self._waiting -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()

    def _wait_for(self, room: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._closed or room())
        if self._closed:
            raise GateClosedError
