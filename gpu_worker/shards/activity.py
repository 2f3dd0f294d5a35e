"""What each rank is doing: it reports that in its signs of life, and the launcher judges by them.

All ranks carry out the same commands and make the same exchanges, in the same order. Each rank
counts them (`Sign.position`). A rank whose count stands still behind another rank's keeps that
rank waiting. The launcher cannot judge by blocked calls: on GPUs, an exchange returns at once.
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

    LOADING: It starts, reads weights or makes a cache. There is no limit on the time for that.
    AWAITING_COMMAND: It and its device have finished every command; rank 0 must send the next.
    IDLE: Rank 0 has no request.
    """

    LOADING = 0
    WORKING = 1
    AWAITING_COMMAND = 2
    IDLE = 3


class Sign(NamedTuple):
    """What a rank reports of itself.

    position: Count of commands begun, commands ended and exchanges entered, the same on all ranks.
    progress: Count of what else this rank has done.
    """

    doing: Doing
    position: int
    progress: int


FIRST_SIGN = Sign(Doing.LOADING, 0, 0)
"""Assumed of a process that has not reported yet."""


class Activity:
    """What a rank does now, as its main thread notes it.

    is_computing: Returns whether the device still computes. Another thread calls it.
    """

    def __init__(self) -> None:
        self._doing = Doing.LOADING
        self._position = 0
        self._progress = 0
        self.is_computing: Callable[[], bool] = lambda: False

    @property
    def sign(self) -> Sign:
        """The sign to send now."""
        doing = self._doing
        if doing is Doing.AWAITING_COMMAND and self.is_computing():
            doing = Doing.WORKING
        return Sign(doing, self._position, self._progress)

    def progressed(self) -> None:
        """Count something that only this rank has done."""
        self._progress += 1

    def exchanges(self) -> None:
        """Count an exchange; from here on, this rank may have to wait for the others."""
        self._position += 1

    @contextmanager
    def command(self) -> Iterator[None]:
        """Count the begin and the end of a command, on rank 0 and on the others."""
        self._position += 1
        try:
            yield
        finally:
            self._position += 1

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Note that weights are read or a cache is made."""
        before, self._doing = self._doing, Doing.LOADING
        try:
            yield
        finally:
            self._doing = before

    @contextmanager
    def waiting(self, what: Doing) -> Iterator[None]:
        """Note that this rank waits for another process; afterwards it works."""
        self._doing = what
        try:
            yield
        finally:
            self._doing = Doing.WORKING

    def give_signs(self, life: int) -> None:
        """Write a sign to a file descriptor every half second, from a thread.

        A process that is stopped, or that never releases Python's lock, falls silent.
        """

        def beat() -> None:
            try:
                while True:
                    os.write(life, _SIGN.pack(*self.sign))
                    time.sleep(_BEAT_EVERY_S)
            except OSError:
                return  # the launcher has ended, and this process ends with it

        threading.Thread(target=beat, name="signs-of-life", daemon=True).start()


def last_sign(life: int) -> Sign | None:
    """Return the newest sign of a file descriptor that has some; None if its writer has ended."""
    # Signs are read whole, because a pipe does not divide writes as short as these.
    found = os.read(life, _MOST_READ)
    if not found:
        return None
    doing, position, progress = _SIGN.unpack(found[-_SIGN.size :])
    return Sign(Doing(doing), position, progress)
