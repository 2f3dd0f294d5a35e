"""Python's garbage collector, told what a long-running process is made of.

Rows come and go by tens of thousands; each of their lists counts towards a collection, and a full
one walks everything that the process has imported: it took half of a GPU worker's time.
"""

import gc

# Container objects made before the youngest are looked through; 700 unless said.
YOUNG_OBJECTS = 20_000


def spare_what_stays() -> None:
    """Call once everything is loaded: what lives now is never looked through again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
