"""What a long-running process tells Python's collector; in a process of its own."""

import subprocess
import sys

PROGRAM = """
import gc
from nightjar.pipeline.collector import YOUNG_OBJECTS, spare_what_stays
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


def test_what_is_loaded_is_spared_and_later_rings_are_still_found() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "spared\n", done.stderr
