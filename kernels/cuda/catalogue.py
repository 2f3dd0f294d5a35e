"""Every kernel instance that the engine uses."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from nightjar.kernels.cuda.kernel import Kernel
from nightjar.kernels.cuda.nvrtc import SOURCES

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""A100, H100 and H200, B200."""

WRAPPERS = tuple(
    import_module(f"nightjar.kernels.cuda.{path.stem}") for path in sorted(SOURCES.glob("*.cu"))
)
"""The module beside each source."""


def all_kernels() -> Iterator[Kernel]:
    """Yield the instances of every wrapper module."""
    for module in WRAPPERS:
        yield from module.specialisations()


def by_source() -> dict[str, list[Kernel]]:
    """Return them by the name of their .cu file."""
    found: dict[str, list[Kernel]] = {}
    for kernel in all_kernels():
        found.setdefault(kernel.source, []).append(kernel)
    return found
