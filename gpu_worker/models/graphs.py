"""Launches a repeated step, as it is or as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

Step = Callable[[], None]
"""Launches work that uses the same tensors every time and does not wait."""

WARM_UPS = 2
"""Steps before the recording: they compile and load kernels, and libraries take their memory."""


class Recorder(Protocol):
    """Makes a step cheaper to launch."""

    def __call__(self, step: Step) -> Step:
        """Return a function that does the same.  It may run the step up to WARM_UPS times."""


def eager(step: Step) -> Step:
    """Return the step itself."""
    return step


class CudaGraphs:
    """Records steps as CUDA graphs: one launch replaces several hundred.

    The graphs share their memory, so only one may run at a time.
    """

    def __init__(self) -> None:
        self._pool: Any = None  # torch names the type privately
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, step: Step) -> Step:
        """Record the step on the current device."""
        if self._stream is None:  # one for all graphs: libraries keep a workspace for each
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side = self._stream
        side.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        # Around the recording too: where it fails, torch leaves its stream as the current one.
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()
            # Other threads query events meanwhile: NCCL's watchdog, and a rank's signs of life.
            recording = torch.cuda.graph(
                graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
            )
            with _no_collection(), recording:
                step()
        torch.cuda.current_stream().wait_stream(side)
        self._pool = graph.pool()
        return graph.replay


@contextmanager
def _no_collection() -> Iterator[None]:
    """Switch garbage collection off: to free device memory or pinned memory breaks a recording."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
