"""Runs figures in a process of their own, one after another; what fails does not stop the rest.

A kernel that faults leaves its process without a usable device.  So a process that failed measures
nothing more, and another one is started for the rest.
"""

import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from typing import Any

START_S = 120.0
"""In which a process has loaded torch and seen its device."""
END_S = 10.0
FAILURE_LINES = 12

Result = dict[str, Any]
_labs: list[Any] = []
"""In the measuring process: its lab."""


def prepare(device: str, scale: str) -> Result:
    """Make the process's lab; returns what machine it is on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner ends this process
    faulthandler.enable()
    # What is printed inside is not the benchmark's: its table goes to the standard output.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import torch  # noqa: PLC0415 (takes seconds, and may be what fails)

    from benchmarks.machine import describe_device  # noqa: PLC0415

    from .lab import Lab  # noqa: PLC0415
    from .scale import SCALES  # noqa: PLC0415

    if device == "cpu":
        torch.set_num_threads(1)  # on a busy machine tiny products wait for a second one
    _labs.append(Lab(device, SCALES[scale]))
    return describe_device(device)


def measure(name: str) -> Result:
    """In the measuring process: one figure's part of the result."""
    return measured(_labs[0], name)


def measured(lab: Any, name: str) -> Result:  # noqa: ANN401
    """One figure's part of the result, with the engine's warnings: where it goes on slower, its
    figure must say so."""
    from .targets import CAUSES, FIGURES  # noqa: PLC0415

    started, said = time.perf_counter(), BufferingHandler(10_000)
    said.setLevel(logging.WARNING)
    logging.getLogger("nightjar").addHandler(said)
    try:
        lab.collect()  # what the last figure left
        status = {"status": "measured", **(FIGURES | CAUSES)[name].measure(lab)}
    except Exception as error:  # noqa: BLE001 (told, not swallowed)
        status = _failed(error)
    finally:
        logging.getLogger("nightjar").removeHandler(said)
    gave_up = any(getattr(one, "action", None) == "windows_given_up" for one in said.buffer)
    if gave_up and status["status"] == "measured":
        reason = "the engine gave its windows up: what was timed are single steps"
        status = {"status": "failed", "reason": reason}
    if lines := dict.fromkeys(map(_line, said.buffer)):
        status["said"] = list(lines)
    return status | {"took_s": round(time.perf_counter() - started, 2)}


def _line(record: logging.LogRecord) -> str:
    """A message with its error."""
    error = record.exc_info[1] if record.exc_info else None
    return record.getMessage() + (f": {error!r}" if error is not None else "")


def _failed(error: Exception) -> Result:
    """The error, and where it came from."""
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return {"status": "failed", "reason": "\n".join(lines[-FAILURE_LINES:])}


@dataclass
class Worker:
    """A process that measures figures; started when the first is asked for, replaced by the next
    call where one failed, was late or ended.

    prepare, measure: what the process runs when it starts, and for a figure.
    """

    device: str
    scale: str
    prepare: Callable[[str, str], Result] = prepare
    measure: Callable[[str], Result] = measure
    machine: Result = field(default_factory=dict)
    _pool: ProcessPoolExecutor | None = None
    _processes: set[BaseProcess] = field(default_factory=set)

    def result(self, name: str, budget_s: float, left_s: float) -> Result:
        """One figure's result.

        budget_s: of the figure alone; left_s: of all, in which a process is started if none runs.
        """
        started, limit_s = time.monotonic(), min(START_S, left_s)
        try:
            if self._pool is None:
                others = set(active_children())
                self._pool = ProcessPoolExecutor(1, get_context("spawn"))
                ready = self._pool.submit(self.prepare, self.device, self.scale)
                self._processes = set(active_children()) - others
                self.machine = ready.result(limit_s)
            limit_s = max(0.0, min(budget_s, left_s - (time.monotonic() - started)))
            found = self._pool.submit(self.measure, name).result(limit_s)
        except TimeoutError:
            found = {"status": "failed", "reason": f"not finished after {limit_s:.0f} s"}
        except Exception as error:  # noqa: BLE001 (told, not swallowed)
            found = _failed(error)
        if found["status"] == "failed":
            self.stop()
        return {"took_s": round(time.monotonic() - started, 2)} | found

    def stop(self, patience_s: float = 0.0) -> None:
        """End the process; with some patience it may end by itself."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in self._processes:
                process.join(patience_s)
                process.kill()
            self._pool = None


def run(
    worker: Worker,
    figures: Sequence[tuple[str, float]],
    limit_s: float,
    wrote: Callable[[Result, Result], None],
) -> Result:
    """Measure (name, seconds it may take) in order, `limit_s` in all; returns all results.

    wrote: called with the machine and all results after each figure.
    """
    ends, results = time.monotonic() + limit_s, Result()
    try:
        for name, budget_s in figures:
            left = ends - time.monotonic()
            if left <= 0:
                results[name] = {"status": "no time left", "reason": f"{limit_s:.0f} s are over"}
            else:
                results[name] = worker.result(name, budget_s, left)
            wrote(worker.machine, results)
    finally:
        worker.stop(END_S)
    return results
