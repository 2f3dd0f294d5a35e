"""The processes that compute one model: started together, watched and ended together.

There is one process for each shard. Rank 0 talks to the worker; the other ranks follow rank 0.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from nightjar.children import start_child, wait_or_kill
from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.shards import startup
from nightjar.gpu_worker.shards.activity import last_sign
from nightjar.gpu_worker.shards.exits import EXIT_GROUP_LOST
from nightjar.gpu_worker.shards.startup import StartUp
from nightjar.gpu_worker.worker.rank_environment import environment
from nightjar.gpu_worker.worker.rank_process import RankProcess, how_rank_ended

Program = Callable[[int], list[str]]
"""Gives the command that a rank runs; the start-up message is added to it."""

_EXIT_GRACE_S = 5.0
_REAP_S = 1.0  # between the last file descriptor of a process and its exit status
_LONGEST_GAP_S = 1.0


def program(rank: int) -> list[str]:
    """Return the command of a rank: the compute process, or a process that follows it."""
    module = "compute" if rank == 0 else "shards"
    return [sys.executable, "-m", f"nightjar.gpu_worker.{module}"]


class ComputeGroup:
    """The processes of one model, started together and ended together.

    Args:
        config: The model, and how it is computed.
        program: What each rank runs.

    Raises:
        ShardError: The worker sees fewer devices than the configuration names.
        OSError: A process cannot be started.
    """

    def __init__(self, config: ComputeConfig, program: Program = program) -> None:
        self._config = config
        self._program = program
        # Only for several ranks: a worker that is killed leaves the directory behind.
        self._meeting = (
            tempfile.TemporaryDirectory(prefix="nightjar-ranks-") if config.ranks > 1 else None
        )
        self._reason: str | None = None
        self._checked_at = time.monotonic()
        self.pipe, theirs = Pipe()
        pairs = [Pipe() for _ in range(config.ranks - 1)]
        pipes = [theirs, *(follower for _, follower in pairs)]
        ends = [rank_zero for rank_zero, _ in pairs]
        self._members = [self._start(rank, pipe, ends) for rank, pipe in enumerate(pipes)]
        for pipe in [*pipes, *ends]:
            pipe.close()

    @property
    def pid(self) -> int:
        """Process id of rank 0."""
        return self._members[0].process.pid

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [member.process.pid for member in self._members]

    @property
    def watched(self) -> list[int]:
        """File descriptors of the signs of life; empty if there is only one process."""
        return [member.life for member in self._members if member.life is not None]

    def fault(self, ready: Container[object]) -> str | None:
        """Read the signs of life that are `ready`; return what is wrong with a rank, or None.

        At most _LONGEST_GAP_S between two calls counts as silence. If this process was stopped too,
        the silence of a rank means nothing.
        """
        now, limit = time.monotonic(), self._config.rank_late_after_s
        passed, self._checked_at = min(now - self._checked_at, _LONGEST_GAP_S), now
        lives = [(member, member.life) for member in self._members if member.life is not None]
        members = [member for member, _ in lives]
        for member, life in lives:
            if life not in ready:
                member.note_silence(passed)
            elif (sign := last_sign(life)) is not None:
                member.note_sign(sign)
            else:
                return self._blame(member)
        for member in members:
            if member.silent_s > limit:
                return f"of rank {member.rank} stalled: no sign of life in {limit:g} s"
        for member in members:
            waited_for = any(map(member.is_waited_for_by, members))
            member.late_s = member.late_s + passed if waited_for else 0.0
        late = [member for member in members if member.late_s > limit]
        return self._late(late) if late else None

    def kill(self, reason: str) -> None:
        """Kill every process, for this reason."""
        self._reason = reason
        for member in self._members:
            member.process.kill()
        self._close_lives()

    def terminate(self) -> None:
        """Ask every process to end."""
        for member in self._members:
            member.process.terminate()

    def wait(self) -> None:
        """Wait until all have ended: rank 0 within a grace period, the others by a kill."""
        if self._reason is None and len(self._members) > 1:
            self._reason = self._blame(self._members[0])
        first, *others = self._members
        wait_or_kill(first.process, _EXIT_GRACE_S)
        for member in others:
            member.process.kill()
            member.process.wait()
        self._close_lives()
        if self._meeting is not None:
            self._meeting.cleanup()

    def ending(self) -> str:
        """Say, as a verb, how the group ended."""
        return self._reason or how_rank_ended(self._members[0].process.returncode)

    def _start(self, rank: int, pipe: Connection, ends: list[Connection]) -> RankProcess:
        """Start a rank; `ends` are rank 0's pipes to its followers."""
        life, theirs, meeting = None, None, None
        followers = tuple(end.fileno() for end in ends) if rank == 0 else ()
        descriptors = [pipe.fileno(), *followers]
        if self._meeting is not None:
            life, theirs = os.pipe()
            descriptors.append(theirs)
            meeting = Path(self._meeting.name) / "store"
        start = StartUp(
            self._config,
            pipe=pipe.fileno(),
            worker=os.getpid(),
            rank=rank,
            life=theirs,
            meeting=meeting,
            followers=followers,
        )
        process = start_child(
            [*self._program(rank), startup.encode(start)],
            environment=environment(self._config, rank),
            descriptors=descriptors,
        )
        if theirs is not None:
            os.close(theirs)
        return RankProcess(rank, process, life)

    def _blame(self, ended: RankProcess) -> str:
        """Say which rank ended first and how; the others left because of it."""
        try:
            ended.process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return f"of rank {ended.rank} closed its pipes"
        late = [
            member
            for member in self._members
            if member.process.poll() is None and member.late_s > self._config.rank_late_after_s / 2
        ]
        left = [0, EXIT_GROUP_LOST]  # 0: a follower whose pipe rank 0 has closed
        if late:  # NCCL's watchdog aborts a process that has waited too long for another
            left.append(-signal.SIGABRT)
        deadline = time.monotonic() + _REAP_S
        while True:
            for member in self._members:
                status = member.process.poll()
                if status is not None and status not in left:
                    return f"of rank {member.rank} {how_rank_ended(status)}"
            if late:
                return self._late(late)
            if time.monotonic() > deadline:
                return f"of rank {ended.rank} lost the others: see the log"
            time.sleep(_REAP_S / 20)  # the rank that made this one leave may still be ending

    def _late(self, members: "list[RankProcess]") -> str:
        """Blame, among the ranks that kept others waiting, the one furthest behind."""
        least = min(members, key=lambda member: member.sign.position)
        limit = self._config.rank_late_after_s
        return f"of rank {least.rank} stalled: the others waited {limit:g} s"

    def _close_lives(self) -> None:
        for member in self._members:
            if member.life is not None:
                os.close(member.life)
                member.life = None
