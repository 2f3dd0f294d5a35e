"""Switches for parts of the CUDA path, to find the cause of an error or of a slow run.

Results stay right with any part off.  Only the order of sums may change, and with it the last bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Switches:
    """What the kernels of this process use.

    prefetch: prefetch the next product's weights, and a split's keys and values, into the
    second-level cache.
    small_products: compute products of up to 8 rows in 16 bits with `linear.cu`; else with cuBLAS.
    fused_heads: let decode attention finish its heads itself; else `qkv_post` runs before it.
    """

    prefetch: bool = True
    small_products: bool = True
    fused_heads: bool = True


_current = Switches()


def current() -> Switches:
    """The switches of this process."""
    return _current


def choose(switches: Switches) -> None:
    """Set them for the process.  Call it before weights are packed and graphs are captured."""
    global _current  # noqa: PLW0603 (the process has one set)
    _current = switches


@contextmanager
def using(switches: Switches) -> Iterator[None]:
    """Set these switches inside the block.  An engine must be made and used inside."""
    before = current()
    choose(switches)
    try:
        yield
    finally:
        choose(before)
