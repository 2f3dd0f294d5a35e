"""Runs figures one after another, each within its time; what fails does not stop the rest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from .worker import serve

START_S = 120.0
"""In which a process has loaded torch and seen its device."""

END_S = 10.0

Result = dict[str, Any]


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
        started = time.monotonic()
        limit_s = 0.0
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
    ends = time.monotonic() + limit_s
    results: Result = {}
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


def write_json(path: Path, content: Result) -> None:
    """Whole or not at all, so that what was measured outlives whatever comes next."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)
