"""Launches a repeated step, as it is or as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from nightjar.kernels.device import free_bytes

Step = Callable[[], None]
"""Launches work that uses the same tensors every time and does not wait."""

WARM_UPS = 2
"""Steps before the recording: they compile and load kernels, and libraries take their memory."""


class NotRecordedError(RuntimeError):
    """A step runs, but it cannot be recorded."""


class Recorder(Protocol):
    """Makes a step cheaper to launch."""

    def __call__(self, step: Step) -> Step:
        """Return a function that does the same.  It may run the step up to WARM_UPS times.

        Raises:
            NotRecordedError: See there.  What the step itself raises comes as it is.
        """


def eager(step: Step) -> Step:
    """Return the step itself."""
    return step


class CudaGraphs:
    """Records steps as CUDA graphs: one launch replaces several hundred.

    The graphs share their memory, so only one may run at a time.
    """

    def __init__(self, most_bytes: int = 0) -> None:
        """most_bytes: what a step takes at most, where that is known.

        The graphs then take it at once, and every step its part.  Else steps of growing sizes would
        each take memory beside that of smaller ones.
        """
        self._most_bytes = most_bytes
        self._first: torch.cuda.CUDAGraph | None = None  # holds the memory of all others
        self._pool: Any = None  # torch names the type privately
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, step: Step) -> Step:
        """Record the step on the current device; raises as Recorder says."""
        if self._stream is None:  # one for all graphs: libraries keep a workspace for each
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side = self._stream
        side.wait_stream(torch.cuda.current_stream())
        try:
            # Around the recording too: where it fails, torch leaves its stream as the current one.
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    step()
                try:
                    self._take_memory(side)
                    return self._recorded(step, side).replay
                except RuntimeError as error:
                    raise NotRecordedError(str(error)) from error
        finally:  # where a recording fails, the step is launched on the current stream
            torch.cuda.current_stream().wait_stream(side)

    def _recorded(self, step: Step, side: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """Record a step on the stream `side`, which is the current one."""
        graph = torch.cuda.CUDAGraph()
        # Other threads query events meanwhile: NCCL's watchdog, and a rank's signs of life.
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
        )
        with _no_collection(), recording:
            step()
        self._pool = graph.pool()
        return graph

    def _take_memory(self, side: torch.cuda.Stream) -> None:
        """Take the memory of the largest step before the first recording, if it is there."""
        most, self._most_bytes = self._most_bytes, 0

        def take() -> None:
            """Make a tensor; it is gone at once, and its memory is left to the next recordings."""
            torch.empty(most, dtype=torch.uint8, device="cuda")[:1].zero_()

        if most and free_bytes("cuda") > most:
            self._first = self._recorded(take, side)


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
