"""What a long-running process asks of Python and of the system."""

import ctypes
import gc
import os
import signal
import sys

# Container objects made before the youngest are looked through; 700 unless said.
YOUNG_OBJECTS = 20_000

_PR_SET_PDEATHSIG = 1
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


def step_back(niceness: int) -> None:
    """Let those who answer people go first where all share a machine: the API, the databases.

    niceness: 0 to 19; the process, and what it starts, is at least as nice from now on.
    """
    if hasattr(os, "nice"):  # not on Windows
        os.nice(max(0, niceness - os.nice(0)))


def die_with_parent() -> None:
    """The kernel ends this process with the thread that started it, even where it hangs."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
