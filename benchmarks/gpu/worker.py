"""The process that figures are measured in: one after another, until one fails.

A kernel that faults leaves its process without a usable device, so what failed is measured no
further here: the runner starts another process for the rest.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

FAILURE_LINES = 12


def serve(pipe: Connection, device: str, scale: str) -> None:
    """Answer names of figures with their results, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner ends this process
    # What is printed inside is not the benchmark's: its table goes to the standard output.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        import torch  # noqa: PLC0415 (takes seconds, and may be what fails)

        from .lab import Lab  # noqa: PLC0415
        from .machine import describe  # noqa: PLC0415
        from .scale import SCALES  # noqa: PLC0415

        if device == "cpu":
            torch.set_num_threads(1)  # on a busy machine tiny products wait for a second one
        lab = Lab(device, SCALES[scale])
        pipe.send({"machine": describe(device)})
    except Exception as error:  # noqa: BLE001 (told, not swallowed)
        pipe.send({"failed": _words(error)})
        return
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        pipe.send(measured(lab, name))


def measured(lab: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
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
    if said.lines:
        status["said"] = said.lines
    if said.gave_up and status["status"] == "measured":
        reason = "the engine gave its windows up: what was timed are single steps"
        status = {"status": "failed", "reason": reason, "said": said.lines}
    return status | {"took_s": round(time.perf_counter() - started, 2)}


class Said(logging.Handler):
    """Warnings of the engine: where it can go on, slower, it does, and a figure must say so.

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
