"""Settings of a long-running process: garbage collection, malloc, priority."""

import ctypes
import gc
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# So many new container objects start a collection of the youngest; Python's default is 700.
YOUNG_OBJECTS = 20_000

_SWITCH_EVERY_S = 0.0005

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_KEPT_BYTES = 32 << 20  # as much as every version of glibc accepts
_MOST_KEPT_BYTES = 256 << 20

_AUTOGROUP = Path("/proc/self/autogroup")
_AUTOGROUP_TRIES = 20
if sys.platform == "linux":
    _libc = ctypes.CDLL(None)


@contextmanager
def without_collections() -> Iterator[None]:
    """Run a block of imports without garbage collection.

    Nearly all that they make stays. To look through it again and again took a tenth of the time in
    which a planner or an API starts.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def spare_what_stays() -> None:
    """Exempt all objects that live now from garbage collection; call once everything is loaded.

    Rows come and go by tens of thousands, and each of their lists counts towards a collection. A
    full collection walks everything that the process has imported. Without this call it took half
    of a GPU worker's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory for later; call before anything is allocated.

    The rows of a step are a hundred megabytes that come and go. By default malloc returns them to
    the system each time, which then clears every page again: up to a tenth of a step.
    """
    if sys.platform == "linux" and hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)


def switch_threads_often() -> None:
    """Make threads hand Python's lock on after half a millisecond, and not after five.

    A thread on its way through event loop, database and broker takes the lock a dozen times. Beside
    threads that compute, it would mostly wait for the lock.
    """
    sys.setswitchinterval(_SWITCH_EVERY_S)


class QuickSwitching:
    """Switches threads often while somebody waits for answers, and as usual between.

    To switch often costs a process that computes bulk work a tenth of its time.

    Args:
        lasts_s: So long after the last call of `hurry` the usual interval comes back.
        clock: Monotonic seconds.
    """

    def __init__(
        self, lasts_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lasts_s = lasts_s
        self._clock = clock
        self._usual_s = sys.getswitchinterval()
        self._until = -math.inf

    def hurry(self) -> None:
        """Somebody waits for an answer: switch often from now on."""
        self._until = self._clock() + self._lasts_s
        switch_threads_often()

    def relax(self) -> None:
        """Switch as usual, if nobody has waited for a while; called regularly."""
        if self._clock() > self._until and sys.getswitchinterval() != self._usual_s:
            sys.setswitchinterval(self._usual_s)


def step_back(niceness: int) -> None:
    """Lower this process's priority, so that the API and the databases on the machine go first.

    Where Linux groups processes by session, niceness counts within a session alone, and sessions
    are weighed against each other (sched(7), "The autogroup feature"). A process that leads a
    session of its own lowers that, too. A process that was started from a shell does not: the shell
    shares its session.

    niceness: 0 to 19. This process and its children are at least as nice from now on.
    """
    if hasattr(os, "nice"):  # not on Windows
        os.nice(max(0, niceness - os.nice(0)))
    if sys.platform == "linux" and os.getsid(0) == os.getpid():
        _lower_session(niceness)


def _lower_session(niceness: int) -> None:
    """Give this session's autogroup the same niceness, where Linux has one."""
    try:
        shown = _AUTOGROUP.read_text()  # "/autogroup-25 nice 0"; nothing inside a control group
    except OSError:
        return
    if not shown or int(shown.split()[-1]) >= niceness:
        return
    for _ in range(_AUTOGROUP_TRIES):
        try:
            _AUTOGROUP.write_text(str(niceness))
        except BlockingIOError:  # Linux takes one write in 0.1 s from all users
            time.sleep(random.uniform(0.1, 0.2))  # so that workers do not retry at once
        except OSError:
            return
        else:
            return
