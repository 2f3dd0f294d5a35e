"""Who may use the compute process now: ordinary work together, or one suspect alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


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

    @contextmanager
    def together(self) -> Iterator[None]:
        """Hold the gate beside others of this kind."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._waiting)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the gate with nobody beside."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._alone and not self._inside)
            self._waiting -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()
