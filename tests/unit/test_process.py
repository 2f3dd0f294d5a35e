"""What a long-running process asks of Python and of the system; each in a process of its own."""

import gc
import subprocess
import sys
from importlib import import_module

import pytest

from nightjar.process import QuickSwitching, without_collections

PROGRAM = """
import gc
from nightjar.process import YOUNG_OBJECTS, spare_what_stays
kept = [[] for _ in range(10_000)]
spare_what_stays()
assert gc.get_freeze_count() > 10_000
assert gc.get_threshold()[0] == YOUNG_OBJECTS

class Node:
    ended = 0
    def __init__(self):
        self.ring = self
    def __del__(self):
        Node.ended += 1

for _ in range(3 * YOUNG_OBJECTS):
    Node()
assert Node.ended > YOUNG_OBJECTS, Node.ended
print("spared")
"""


KEPT = """
import ctypes, resource, sys
from nightjar.process import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
if not hasattr(libc, "mallopt"):
    sys.exit("another malloc")
keep_freed_memory()

def use(mebibytes):
    place = libc.malloc(mebibytes << 20)
    ctypes.memset(place, 1, mebibytes << 20)
    libc.free(place)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

use(24)
before = faults()
for _ in range(8):
    use(24)
print(faults() - before < 1000)  # 6144 pages each time, where they are given back
"""

NICER = """
import os, subprocess, sys
from nightjar.process import step_back
before = os.nice(0)
for niceness in (before + 3, before + 1):  # the second asks for less than there is
    step_back(niceness)
child = subprocess.run([sys.executable, "-c", "import os; print(os.nice(0))"],
                       capture_output=True, text=True, check=True)
print(os.nice(0) - before, int(child.stdout) - before)
"""

SWITCHING = """
import sys
from nightjar.process import switch_threads_often

switch_threads_often()
print(sys.getswitchinterval() < 0.001)
"""

SESSION = """
import time
from pathlib import Path
from nightjar.process import step_back

shown = Path("/proc/self/autogroup")

def nice():
    return int(shown.read_text().split()[-1])

try:
    nice()
    while True:  # the system takes one in a tenth of a second from all users
        try:
            shown.write_text("1")
            break
        except BlockingIOError:
            time.sleep(0.1)
except (OSError, IndexError):  # no such file, nothing in it, or not to be written
    print("not weighed")
else:
    print(nice(), end=" ")
    step_back(7)
    print(nice(), end=" ")
    step_back(3)
    print(nice())
"""

SHARED = """
from pathlib import Path
from nightjar.process import step_back
shown = Path("/proc/self/autogroup")
before = shown.read_text() if shown.exists() else ""
step_back(7)
print((shown.read_text() if shown.exists() else "") == before)
"""


def ran(program: str, *, session: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        start_new_session=session,
    )
    return done.stdout or done.stderr


def test_what_is_loaded_is_spared_and_later_rings_are_still_found() -> None:
    assert ran(PROGRAM) == "spared\n"


def test_memory_that_was_freed_is_used_again_without_the_system() -> None:
    assert ran(KEPT) in ("True\n", "another malloc\n")


def test_a_process_steps_back_with_what_it_starts_and_never_forward() -> None:
    assert ran(NICER) == "3 3\n"


def test_a_session_of_its_own_steps_back_too() -> None:
    assert ran(SESSION, session=True) in ("1 7 7\n", "not weighed\n")


def test_a_session_that_others_share_stays_as_it_is() -> None:
    assert ran(SHARED) == "True\n"


def test_threads_hand_pythons_lock_on_often() -> None:
    assert ran(SWITCHING) == "True\n"


def test_threads_switch_often_only_while_somebody_waits() -> None:
    usual, now = sys.getswitchinterval(), [0.0]
    switching = QuickSwitching(10, lambda: now[0])
    try:
        switching.relax()
        assert sys.getswitchinterval() == usual
        switching.hurry()
        for moment, is_quick in ((9.0, True), (10.5, False), (11.0, False)):
            now[0] = moment
            switching.relax()
            assert (sys.getswitchinterval() < usual) == is_quick
        switching.hurry()
        assert sys.getswitchinterval() < usual
    finally:
        sys.setswitchinterval(usual)


def test_imports_run_without_collections_and_what_follows_with_them():
    assert gc.isenabled()
    with without_collections():
        assert not gc.isenabled()
    with pytest.raises(ImportError), without_collections():
        import_module("no_such_module")
    assert gc.isenabled()
