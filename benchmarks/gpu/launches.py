"""What the launches of an engine's decode steps cost: the host's seconds, and the device's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nightjar.gpu_worker.engine import Engine

from .lab import MeasuringError


@dataclass
class Launches:
    """Every launch of decode steps of one engine from now on.

    What lies between the beginning and the end of a launch on the device is its span: the device is
    at work there, unless the host is too slow for it.  Between two spans it waits for the host.
    """

    _host: list[float] = field(default_factory=list)
    _marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @staticmethod
    def of(engine: Engine, device: str) -> Launches:
        """Watch an engine: its windows; on a CPU, where it has none, its single steps.

        Raises:
            MeasuringError: It has no windows on a GPU.
        """
        found = Launches()
        if device != "cuda":
            steps: Any = engine._executor  # not its type: a method is put in the place of its own
            steps.run = found._watched(steps.run, mark=False)
        elif engine._windows is None:
            raise MeasuringError("the engine launches single steps: it has no windows")
        else:
            windows: Any = engine._windows
            windows._launch = found._watched(windows._launch, mark=True)
        return found

    def take(self) -> tuple[float, float]:
        """Seconds of the host in all launches since the last call, and of their spans, which must
        be over: without events the host's own.

        Raises:
            MeasuringError: Nothing was launched.
        """
        if not self._host:
            raise MeasuringError("no window of steps was launched: see what the engine says")
        host = sum(self._host)
        spans = [begin.elapsed_time(end) / 1e3 for begin, end in self._marks]
        self._host.clear()
        self._marks.clear()
        return host, sum(spans) if spans else host

    def _watched(self, launch: Callable[[Any], Any], *, mark: bool) -> Callable[[Any], Any]:
        def watched(given: Any) -> Any:  # noqa: ANN401 (whatever the launch takes and gives)
            if mark:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
            started = time.perf_counter()
            found = launch(given)
            self._host.append(time.perf_counter() - started)
            if mark:
                end.record()
                self._marks.append((begin, end))
            return found

        return watched
