"""What each rank is doing: it says so with its signs of life, and the launcher judges by it.

All ranks carry out the same commands and make the same exchanges, in one order. So each counts how
far it has come (`Sign.position`), and one that stands still where another is ahead of it keeps that
one waiting, whatever either of them is blocked in: on GPUs an exchange returns at once.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple

_BEAT_EVERY_S = 0.5
_SIGN = struct.Struct("<B7xQQ")
_MOST_READ = 128 * _SIGN.size


class Doing(IntEnum):
    """What a rank is busy with, or waits for.

    LOADING: it starts, reads weights or makes a cache; how long that takes is the disk's to say.
    AWAITING_COMMAND: it has done all that it was told, and so has its device: rank 0 is to move.
    IDLE: rank 0 has no request.
    """

    LOADING = 0
    WORKING = 1
    AWAITING_COMMAND = 2
    IDLE = 3


class Sign(NamedTuple):
    """What a rank says of itself.

    position: commands begun, commands ended and exchanges entered, which all ranks have in common.
    progress: what else this rank has done.
    """

    doing: Doing
    position: int
    progress: int


FIRST_SIGN = Sign(Doing.LOADING, 0, 0)
"""What holds of a process that has said nothing yet."""


class Activity:
    """A rank's own account of what it does, kept by its main thread.

    is_computing: whether the device has something left to do; asked by another thread.
    """

    def __init__(self) -> None:
        self._doing = Doing.LOADING
        self._position = 0
        self._progress = 0
        self.is_computing: Callable[[], bool] = lambda: False

    @property
    def sign(self) -> Sign:
        """What there is to say now."""
        doing = self._doing
        if doing is Doing.AWAITING_COMMAND and self.is_computing():
            doing = Doing.WORKING
        return Sign(doing, self._position, self._progress)

    def progressed(self) -> None:
        """This rank has done something that the others have no part in."""
        self._progress += 1

    def exchanges(self) -> None:
        """From here on this rank may have to wait for the others."""
        self._position += 1

    @contextmanager
    def command(self) -> Iterator[None]:
        """One command: rank 0 gives it, the others carry it out."""
        self._position += 1
        try:
            yield
        finally:
            self._position += 1

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Weights are read, or a cache is made."""
        before, self._doing = self._doing, Doing.LOADING
        try:
            yield
        finally:
            self._doing = before

    @contextmanager
    def waiting(self, what: Doing) -> Iterator[None]:
        """The next move is another process's; then this one is at work."""
        self._doing = what
        try:
            yield
        finally:
            self._doing = Doing.WORKING

    def give_signs(self, life: int) -> None:
        """Write a sign every half second to a file descriptor, from a thread: a process that is
        stopped, or holds Python's lock for good, falls silent."""

        def beat() -> None:
            try:
                while True:
                    os.write(life, _SIGN.pack(*self.sign))
                    time.sleep(_BEAT_EVERY_S)
            except OSError:
                return  # the launcher is gone, and this process about to be

        threading.Thread(target=beat, name="signs-of-life", daemon=True).start()


def last_sign(life: int) -> Sign | None:
    """The newest sign at a file descriptor that has some; None where no more can come."""
    # Signs are written and read whole: both take fewer bytes than a pipe keeps together.
    found = os.read(life, _MOST_READ)
    if not found:
        return None
    doing, position, progress = _SIGN.unpack(found[-_SIGN.size :])
    return Sign(Doing(doing), position, progress)
