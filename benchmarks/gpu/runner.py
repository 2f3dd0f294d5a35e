"""Runs figures in a process of their own, one after another; what fails does not stop the rest.

A kernel that faults leaves its process without a usable device.  So a process that failed measures
nothing more, and another one is started for the rest.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

START_S = 120.0
"""In which a process has loaded torch and seen its device."""
END_S = 10.0
FAILURE_LINES = 12

Result = dict[str, Any]


def serve(pipe: Connection, device: str, scale: str) -> None:
    """In the process: answer names of figures with their results, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner ends this process
    # What is printed inside is not the benchmark's: its table goes to the standard output.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        import torch  # noqa: PLC0415 (takes seconds, and may be what fails)

        from benchmarks.machine import describe_device  # noqa: PLC0415

        from .lab import Lab  # noqa: PLC0415
        from .scale import SCALES  # noqa: PLC0415

        if device == "cpu":
            torch.set_num_threads(1)  # on a busy machine tiny products wait for a second one
        lab = Lab(device, SCALES[scale])
        pipe.send({"machine": describe_device(device)})
    except Exception as error:  # noqa: BLE001 (told, not swallowed)
        pipe.send({"failed": _words(error)})
        return
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        pipe.send(measured(lab, name))


def measured(lab: Any, name: str) -> Result:  # noqa: ANN401
    """One figure's part of the result."""
    from .targets import BY_NAME, CAUSES  # noqa: PLC0415

    started, said = time.perf_counter(), Said()
    logging.getLogger("nightjar").addHandler(said)
    try:
        lab.collect()  # what the last figure left
        found = (BY_NAME.get(name) or CAUSES[name]).measure(lab)
        status = {"status": "measured", **found}
    except Exception as error:  # noqa: BLE001 (told, not swallowed)
        status = {"status": "failed", "reason": _words(error)}
    finally:
        logging.getLogger("nightjar").removeHandler(said)
    if said.gave_up and status["status"] == "measured":
        reason = "the engine gave its windows up: what was timed are single steps"
        status = {"status": "failed", "reason": reason}
    heard = {"said": said.lines} if said.lines else {}
    return status | heard | {"took_s": round(time.perf_counter() - started, 2)}


class Said(logging.Handler):
    """Keeps the engine's warnings: where it goes on slower, its figure must say so.

    gave_up: whether it went on without windows, as where a graph cannot be captured.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.gave_up = False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep each message once, with its error."""
        self.gave_up |= getattr(record, "action", None) == "windows_given_up"
        error = record.exc_info[1] if record.exc_info else None
        line = record.getMessage() + (f": {error!r}" if error is not None else "")
        if line not in self.lines:
            self.lines.append(line)


def _words(error: Exception) -> str:
    """The error, and where it came from."""
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return "\n".join(lines[-FAILURE_LINES:])


class WorkerError(Exception):
    """The process ended, or could not be started."""


@dataclass
class Worker:
    """A process that measures figures; started when the first is asked for."""

    device: str
    scale: str
    target: Callable[[Connection, str, str], None] = serve
    machine: Result = field(default_factory=dict)
    _process: SpawnProcess | None = None
    _pipe: Any = None

    def start(self, limit_s: float = START_S) -> None:
        """Start the process, unless it runs."""
        if self._process is not None:
            return
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # No daemon: those may have no children, and torch's compiler starts some.
        self._process = context.Process(target=self.target, args=(theirs, self.device, self.scale))
        self._process.start()
        theirs.close()
        hello = self._receive(limit_s)
        if hello is None or "machine" not in hello:
            self.stop()
            raise WorkerError((hello or {}).get("failed", f"no answer within {limit_s:.0f} s"))
        self.machine = hello["machine"]

    def measure(self, name: str, budget_s: float, left_s: float) -> Result:
        """One figure's result; a process that is late or ends is replaced by the next call.

        budget_s: of the figure alone; left_s: of all, in which a process is started if none runs.
        """
        started, limit_s = time.monotonic(), 0.0
        try:
            self.start(min(START_S, left_s))
            limit_s = max(0.0, min(budget_s, left_s - (time.monotonic() - started)))
            self._pipe.send(name)
            found = self._receive(limit_s)
        except (WorkerError, OSError) as error:
            found = {"status": "failed", "reason": str(error)}
        if found is None:
            found = {"status": "failed", "reason": f"not finished after {limit_s:.0f} s"}
        if found["status"] == "failed":
            self.stop()
        return {"took_s": round(time.monotonic() - started, 2)} | found

    def stop(self, patience_s: float = 0.0) -> None:
        """End the process; with some patience it may end by itself."""
        if self._process is not None:
            self._pipe.close()
            self._process.join(patience_s)
            self._process.kill()
            self._process.join()
            self._process = None

    def _receive(self, limit_s: float) -> Result | None:
        """What the process says next; None where it says nothing in time."""
        assert self._process is not None
        if not self._pipe.poll(limit_s):
            return None
        try:
            found: Result = self._pipe.recv()
        except EOFError:
            self._process.join(10)
            raise WorkerError(f"the process ended (exit {self._process.exitcode})") from None
        return found


def run(
    worker: Worker,
    figures: Sequence[tuple[str, float]],
    limit_s: float,
    wrote: Callable[[Result, Result], None],
) -> tuple[Result, Result]:
    """Measure (name, seconds it may take) in order, `limit_s` in all.

    wrote: called with the machine and all results after each figure.  Returns them.
    """
    ends, results = time.monotonic() + limit_s, Result()
    try:
        for name, budget_s in figures:
            left = ends - time.monotonic()
            if left <= 0:
                results[name] = {"status": "no time left", "reason": f"{limit_s:.0f} s are over"}
            else:
                results[name] = worker.measure(name, budget_s, left)
            wrote(worker.machine, results)
    finally:
        worker.stop(END_S)
    return worker.machine, results
