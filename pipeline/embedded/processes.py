"""Services of the embedded system: child processes, restarted when they end unasked."""

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nightjar.children import (
    RestartPolicy,
    Supervisor,
    how_ended,
    last_words,
    start_child,
    wait_or_kill,
)
from nightjar.pipeline.queue.commands import CANNOT_START, EXIT_CANNOT_START

# Another start does not help a service that ends so often while no result lands.
RESTARTS = RestartPolicy(most_failures=5)
# A socket's path has at most 107 bytes; its name takes some of them.
_LONGEST_SOCKET_DIRECTORY = 90


class ServiceError(Exception):
    """A service of the embedded system cannot be kept running."""


@dataclass(slots=True)
class Service:
    """One supervised process with the working directory `directory`; its output goes to `log`."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    directory: Path
    _supervisor: Supervisor[subprocess.Popen[bytes]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._supervisor = Supervisor(self._start, RESTARTS)

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The newest process, running or not; None before the first start."""
        return self._supervisor.child

    def start(self) -> None:
        """Start the process; the kernel ends it when this process dies."""
        self._supervisor.start()

    def keep_running(self) -> bool:
        """Start the process again if it has ended; return whether it had.

        Raises:
            ServiceError: It cannot start, or ended too often; the message holds the end of its log.
        """
        if self.process is None or (status := self.process.poll()) is None:
            return False
        # The same status may be temporary here: the service has worked before.
        if status == EXIT_CANNOT_START and not self._supervisor.failures:
            reason = self.log_tail().rpartition(CANNOT_START)[2].strip()
            raise ServiceError(f"the {self.name} cannot start: {reason}")
        if self._supervisor.failed():
            raise ServiceError(
                f"the {self.name} ended {self._supervisor.failures} times and no result landed; "
                f"the last time it {how_ended(status)}; the end of {self.log}:\n{self.log_tail()}"
            )
        self.start()
        return True

    def progressed(self) -> None:
        """Forget earlier ends: results have landed since."""
        self._supervisor.succeeded()

    def stop(self, grace_s: float) -> None:
        """Send TERM, then KILL after the grace period."""
        if self.process is not None:
            self.process.terminate()
            wait_or_kill(self.process, grace_s)

    def log_tail(self) -> str:
        """Return the end of the process's output."""
        return last_words(self.log)

    def _start(self) -> subprocess.Popen[bytes]:
        return start_child(
            self.command,
            environment=self.environment,
            directory=self.directory,  # not a redis.py of the user's directory
            log=self.log,
            own_session=True,  # Ctrl-C reaches only this process, which ends its services in order
            dies_with_thread=True,
        )


def private_directory() -> Path:
    """Make a directory of mode 0700 whose path is short enough for a unix socket in it."""
    directory = tempfile.mkdtemp(prefix="nightjar-")
    if len(os.fsencode(directory)) > _LONGEST_SOCKET_DIRECTORY:
        Path(directory).rmdir()
        directory = tempfile.mkdtemp(prefix="nightjar-", dir="/tmp")
    return Path(directory)
