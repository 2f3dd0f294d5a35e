"""What a long-running process asks of Python and of the system."""

import ctypes
import gc
import os
import random
import signal
import sys
import time
from pathlib import Path

# Container objects made before the youngest are looked through; 700 unless said.
YOUNG_OBJECTS = 20_000

# mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_KEPT_BYTES = 32 << 20  # as much as every version of glibc accepts
_MOST_KEPT_BYTES = 256 << 20

_PR_SET_PDEATHSIG = 1
_AUTOGROUP = Path("/proc/self/autogroup")
_AUTOGROUP_TRIES = 20
if sys.platform == "linux":
    _libc = ctypes.CDLL(None)  # not after a fork


def spare_what_stays() -> None:
    """Call once everything is loaded: what lives now is never looked through again.

    Rows come and go by tens of thousands; each of their lists counts towards a collection, and a
    full one walks everything that the process has imported: it took half of a GPU worker's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def keep_freed_memory() -> None:
    """Call first: memory that was freed is kept for what comes next (of glibc's malloc alone).

    The rows of a step are a hundred megabytes that come and go, and malloc, left alone, gives them
    back to the system time and again and has every page cleared anew: up to a tenth of a step.
    """
    if sys.platform == "linux" and hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)


def step_back(niceness: int) -> None:
    """Let those who answer people go first where all share a machine: the API, the databases.

    Where Linux groups processes by session, niceness counts within a session alone, and sessions
    are weighed against each other (sched(7), "The autogroup feature"): a process that leads a
    session of its own takes that back with it. One that was started from a shell does not: the
    shell shares its session.

    niceness: 0 to 19; the process, and what it starts, is at least as nice from now on.
    """
    if hasattr(os, "nice"):  # not on Windows
        os.nice(max(0, niceness - os.nice(0)))
    if sys.platform == "linux" and os.getsid(0) == os.getpid():
        _take_session_back(niceness)


def _take_session_back(niceness: int) -> None:
    """Make this session's autogroup as nice, where there is one that weighs."""
    try:
        shown = _AUTOGROUP.read_text()  # "/autogroup-25 nice 0"; nothing inside a control group
    except OSError:
        return
    if not shown or int(shown.split()[-1]) >= niceness:
        return
    for _ in range(_AUTOGROUP_TRIES):
        try:
            _AUTOGROUP.write_text(str(niceness))
        except BlockingIOError:  # the system takes one in a tenth of a second from all users
            time.sleep(random.uniform(0.1, 0.2))  # noqa: S311 - so that workers do not keep step
        except OSError:
            return
        else:
            return


def die_with_parent(parent: int | None = None) -> None:
    """The kernel ends this process with the thread that started it, even where it hangs.

    parent: the process that started this one; if that ended before this call, so does this one.
    """
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        sys.exit(1)
