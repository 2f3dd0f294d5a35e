"""Child processes that live and die with this one, and are restarted when they die alone."""

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nightjar.pipeline.commands import CANNOT_START, EXIT_CANNOT_START
from nightjar.process import die_with_parent

# A service that ends so often while no result lands will not get better by being started again.
_MOST_ENDS = 5
_LOG_TAIL_BYTES = 2_000
# A socket's path has at most 107 bytes; its name takes some of them.
_LONGEST_SOCKET_DIRECTORY = 90


class ServiceError(Exception):
    """A service of the embedded system cannot be kept running."""


@dataclass(slots=True)
class Service:
    """One supervised process, standing in `directory`; its output goes to `log`."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    directory: Path
    process: subprocess.Popen[bytes] | None = None
    ends: int = 0  # since the last progress

    def start(self) -> None:
        """Start the process; the kernel ends it should this one die."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.environment),
                cwd=self.directory,  # a redis.py where the user stands is not ours to import
                start_new_session=True,  # Ctrl-C is for this process, which ends them in order
                preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread holds a lock we need
            )

    def keep_running(self) -> bool:
        """Start it again if it has ended; return whether that was so.

        Raises:
            ServiceError: It cannot start, or ended too often; the message holds the end of its log.
        """
        if self.process is None or self.process.poll() is None:
            return False
        # Later on it has worked here before, and may again.
        if self.process.returncode == EXIT_CANNOT_START and not self.ends:
            reason = self.log_tail().rpartition(CANNOT_START)[2].strip()
            raise ServiceError(f"the {self.name} cannot start: {reason}")
        self.ends += 1
        if self.ends == _MOST_ENDS:
            raise ServiceError(
                f"the {self.name} ended {_MOST_ENDS} times and no result landed, last with status "
                f"{self.process.returncode}; the end of {self.log}:\n{self.log_tail()}"
            )
        self.start()
        return True

    def stop(self, grace_s: float) -> None:
        """TERM, then KILL after the grace period."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def log_tail(self) -> str:
        """The last lines that the process wrote."""
        with self.log.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
            return log.read().decode("utf-8", "replace")


def private_directory() -> Path:
    """A new directory of mode 0700 whose path is short enough for a unix socket in it."""
    directory = tempfile.mkdtemp(prefix="nightjar-")
    if len(os.fsencode(directory)) > _LONGEST_SOCKET_DIRECTORY:
        Path(directory).rmdir()
        directory = tempfile.mkdtemp(prefix="nightjar-", dir="/tmp")
    return Path(directory)
