"""Starts, ends and restarts child processes, and describes how they ended.

Three places keep children running: `nightjar run` its services, the API its upload process, and a
GPU worker its compute processes. Each has a `RestartPolicy` of its own and a `Supervisor`.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

Process = subprocess.Popen[bytes]
ChildT = TypeVar("ChildT")

_LAST_WORDS_BYTES = 2_000
_PR_SET_PDEATHSIG = 1
if sys.platform == "linux":
    _libc = ctypes.CDLL(None)  # loaded here: not safe between fork and exec


class ClosedError(Exception):
    """This supervisor starts no child any more."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a child that has ended is started again.

    most_failures: After so many failures in a row the child is given up; None means never.
    pause_s: The wait between an end and the next start.
    stable_after_s: A child that has lived for so long has not failed; None means that only the
        owner's word counts.
    """

    most_failures: int | None = None
    pause_s: float = 0.0
    stable_after_s: float | None = None


class Supervisor(Generic[ChildT]):
    """Starts a child, or a group of them, again and again under a policy.

    The owner watches the child and reports: `failed` when it has ended and should not have,
    `succeeded` when it has done its work. Every method may be called from any thread.

    Args:
        start: Starts one child. What it raises, the method `start` raises.
        policy: When to start it again.
    """

    def __init__(self, start: Callable[[], ChildT], policy: RestartPolicy) -> None:
        self._start = start
        self._policy = policy
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._child: ChildT | None = None
        self._started_at = time.monotonic()
        self._failures = 0

    @property
    def child(self) -> ChildT | None:
        """The newest child, running or not; None before the first start."""
        return self._child

    @property
    def failures(self) -> int:
        """How often the child has failed since its last success."""
        return self._failures

    @property
    def age_s(self) -> float:
        """Seconds since the newest start was tried; before the first, since this object's own."""
        return time.monotonic() - self._started_at

    @property
    def closed(self) -> bool:
        """Whether no child is started any more."""
        return self._closed.is_set()

    def start(self) -> ChildT:
        """Start a child in the place of the last one, and return it.

        Raises:
            ClosedError: `close` was called.
        """
        with self._lock:
            if self.closed:
                raise ClosedError
            self._started_at = time.monotonic()
            self._child = child = self._start()
            return child

    def succeeded(self) -> None:
        """Forget earlier failures: the child has done its work."""
        self._failures = 0

    def failed(self) -> bool:
        """Count a failure; return whether the child is given up now."""
        stable_after_s = self._policy.stable_after_s
        if stable_after_s is not None and self.age_s >= stable_after_s:
            self._failures = 0
        else:
            self._failures += 1
        return self._failures == self._policy.most_failures

    def pause(self) -> None:
        """Wait as long as the policy asks between two starts; return early when this is closed."""
        self._closed.wait(self._policy.pause_s)

    def close(self) -> ChildT | None:
        """Start nothing any more; return the newest child, which is the caller's to end."""
        with self._lock:
            self._closed.set()
            return self._child


def start_child(  # noqa: PLR0913 - each changes one thing about the child
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    log: Path | None = None,
    descriptors: Sequence[int] = (),
    own_session: bool = False,
    dies_with_thread: bool = False,
) -> Process:
    """Start a process that reads nothing from standard input.

    environment: All its variables; None means this process's own.
    directory: Where it stands; None means where this process stands.
    log: A file to append its output to; None means that it writes where this process writes.
    descriptors: File descriptors that it inherits.
    own_session: Ctrl-C in this process's terminal does not reach it.
    dies_with_thread: The kernel ends it with the thread that calls this. For commands that cannot
        call `die_with_parent` themselves. Not safe beside other threads that start processes.

    Raises:
        OSError: The process cannot be started.
    """
    output = None if log is None else log.open("ab")
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            cwd=directory,
            pass_fds=descriptors,
            start_new_session=own_session,
            preexec_fn=die_with_parent if dies_with_thread else None,  # noqa: PLW1509 - see above
        )
    finally:
        if output is not None:
            output.close()


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel end this process with the thread that started it, even where it hangs.

    parent: Process id of the parent. If that has ended before this call, this process ends, too.
    """
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        sys.exit(1)


def wait_or_kill(process: Process, grace_s: float) -> int:
    """Wait for a process to end, kill it after the grace period; return its exit status."""
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def how_ended(status: int) -> str:
    """Say how a process with this exit status ended, as a verb."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def last_words(log: Path) -> str:
    """Return the end of what a child wrote to its log."""
    with log.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - _LAST_WORDS_BYTES))
        return stream.read().decode("utf-8", "replace")
