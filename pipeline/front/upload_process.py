"""Keeps the API's second process running, which takes uploads, and reports its failures."""

import logging
import os
import shutil
import socket
import sys
import threading
from pathlib import Path

from nightjar.children import (
    ClosedError,
    Process,
    RestartPolicy,
    Supervisor,
    how_ended,
    start_child,
)
from nightjar.jobs.api.forwarding import START_S
from nightjar.pipeline.embedded.processes import private_directory

logger = logging.getLogger(__name__)

# Never given up: the cause may pass, and the API answers polls meanwhile.
RESTARTS = RestartPolicy(pause_s=1.0, stable_after_s=START_S)
_GRACE_S = 10.0  # to end in, without an upload: the API's server waits for those
_TOLD_FAILURES = 2  # after so many in a row, `trouble` reports them


class UploadProcess:
    """Keeps a process that takes uploads at `socket` running inside a `with` block.

    ends: How often the process has ended.
    """

    def __init__(self) -> None:
        self._directory = private_directory()
        self.socket = self._directory / "uploads.sock"
        self.ends = 0
        self._last_end = ""
        self._supervisor = Supervisor(self._start, RESTARTS)
        self._thread = threading.Thread(target=self._keep_running, name="uploads", daemon=True)

    def __enter__(self) -> "UploadProcess":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        process = self._supervisor.close()
        if process is not None:
            process.terminate()
            self._thread.join(_GRACE_S)
            if self._thread.is_alive():
                logger.error(
                    "the process that takes uploads has not ended %.0f s after SIGTERM; killed",
                    _GRACE_S,
                    extra={"action": "uploads_killed"},
                )
                process.kill()
        self._thread.join()
        shutil.rmtree(self._directory, ignore_errors=True)

    def trouble(self) -> str | None:
        """Why no upload can be taken; None where one can, or can in a moment."""
        if _listens(self.socket):
            return None
        if (failures := self._supervisor.failures) >= _TOLD_FAILURES:
            return (
                f"uploads are not taken: their process ended {failures} times in a row "
                f"within {START_S:.0f} s of its start, the last time it {self._last_end}; the "
                "API's log says why"
            )
        if (silent_s := self._supervisor.age_s) > START_S:
            return (
                f"uploads are not taken: their process does not listen {silent_s:.0f} s after "
                "its start"
            )
        return None

    def _keep_running(self) -> None:
        while not self._supervisor.closed:
            self._last_end = self._live_once()
            self.ends += 1
            self._supervisor.failed()
            if not self._supervisor.closed:
                logger.error(
                    "the process that takes uploads %s and is started again",
                    self._last_end,
                    extra={"action": "uploads_restarted"},
                )
                self._supervisor.pause()

    def _live_once(self) -> str:
        """Start the process, wait for its end, and return how it ended, as a verb."""
        try:
            process = self._supervisor.start()
        except OSError as error:  # out of memory or of processes: that may pass
            return f"ended before its start ({error})"
        except ClosedError:
            return "was not started"
        return how_ended(process.wait())

    def _start(self) -> Process:
        module = "nightjar.pipeline.front.api_server"
        command = [sys.executable, "-m", module, str(self.socket), str(os.getpid())]
        # A session of its own, so that Ctrl-C reaches only the API, which lets uploads end.
        return start_child(command, own_session=True)


def _listens(path: Path) -> bool:
    """Whether a process takes connections at the socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except TimeoutError:
            return True  # more wait there than it has taken yet
        except OSError:
            return False
    return True
