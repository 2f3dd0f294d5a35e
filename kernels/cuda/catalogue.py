"""Every kernel instance that the engine can ask for."""

from __future__ import annotations

from collections.abc import Iterator

from nightjar.kernels.cuda import (
    activation,
    argmax,
    decode_attention,
    embedding,
    kv_transfer,
    linear,
    merge,
    norm,
    penalties,
    philox,
    qkv_post,
    sample,
    step_update,
    token_nll,
)
from nightjar.kernels.cuda.kernel import Kernel

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""A100, H100 and H200, B200."""

WRAPPERS = (
    activation,
    argmax,
    decode_attention,
    embedding,
    kv_transfer,
    linear,
    merge,
    norm,
    penalties,
    philox,
    qkv_post,
    sample,
    step_update,
    token_nll,
)


def all_kernels() -> Iterator[Kernel]:
    """Of every wrapper module."""
    for module in WRAPPERS:
        yield from module.specialisations()


def by_source() -> dict[str, list[Kernel]]:
    """The same, by the name of their .cu file."""
    found: dict[str, list[Kernel]] = {}
    for kernel in all_kernels():
        found.setdefault(kernel.source, []).append(kernel)
    return found
