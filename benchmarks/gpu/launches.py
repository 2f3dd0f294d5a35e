"""The figure of a decode step's launches: how long the device waits for the host."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from nightjar.gpu_worker.engine import Engine

from .engine_figures import a_step, decoding, warm
from .lab import Lab, MeasuringError, Points, found, generate


class Launches:
    """Every launch of decode steps of one engine from now on: of its windows; on a CPU, where it
    has none, of its single steps.

    A launch's span is the time from its beginning to its end on the device.  The device works in a
    span, unless the host is too slow.  Between two spans it waits for the host.
    """

    def __init__(self, engine: Engine, device: str) -> None:
        """Raises MeasuringError where an engine on a GPU has no windows."""
        self._host: list[float] = []
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if device != "cuda":
            steps: Any = engine.executor  # not its type: a method is put in the place of its own
            steps.run = self._watched(steps.run, mark=False)
        elif engine.windows is None:
            raise MeasuringError("the engine launches single steps: it has no windows")
        else:
            windows: Any = engine.windows
            windows.launch = self._watched(windows.launch, mark=True)

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
            launched = launch(given)
            self._host.append(time.perf_counter() - started)
            if mark:
                end.record()
                self._marks.append((begin, end))
            return launched

        return watched


def launch_overhead(lab: Lab) -> Points:
    """The part of a decode step in which the device waits for the host.

    It is a step's wall time less its launch's span on the device, over the wall time.
    """
    batch = lab.batch(8)
    engine, prompts = decoding(lab, batch)
    warm(engine, lab, prompts)
    launches = Launches(engine, lab.device)

    def seconds(tokens: int) -> tuple[float, float, float]:
        wall = lab.wall_s(lambda: generate(engine, prompts, tokens))
        return wall, *launches.take()

    wall, host, span = a_step(lab, seconds)
    about: dict[str, Any] = {"step": wall, "host": host, "span": span, "batch": batch}
    if host.median > span.median / 2:
        about["warning"] = (
            f"the host launches a step in {1e6 * host.median:.0f} us, the device takes "
            f"{1e6 * span.median:.0f} us: it may wait for the host where this does not count it"
        )
    pairs = zip(wall.seconds, span.seconds, strict=True)
    return found(about, launch_overhead=median(1 - busy / whole for whole, busy in pairs))
