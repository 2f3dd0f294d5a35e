"""A lock on the compute process: ordinary micro-batches share it, a suspect has it alone."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ClosedError(Exception):
    """The lock was closed, because the worker ends."""


class SharedOrAlone:
    """A lock that many threads share or one thread holds alone.

    Suspects go first: while one waits, no other thread gets a share. So the compute process is
    emptied once for all suspects that wait, and not once for each.
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
        """Refuse the lock from now on; threads that hold it keep it until they are done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with other threads.

        Raises:
            ClosedError: The lock was closed before the thread got it.
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
        """Hold the lock alone.

        Raises:
            ClosedError: The lock was closed before the thread got it.
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

    def _wait_for(self, is_free: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._closed or is_free())
        if self._closed:
            raise ClosedError
