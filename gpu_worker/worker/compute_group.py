"""The processes that compute one model: how they are started, whether they live, how they ended.

There is one, or one a shard: rank 0, which the worker speaks to, and the ranks that follow it.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Container
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from nightjar.checkpoints import ShardError
from nightjar.children import Process, how_ended, start_child, wait_or_kill
from nightjar.gpu_worker.shards.activity import FIRST_SIGN, Doing, Sign, last_sign
from nightjar.gpu_worker.shards.exits import EXIT_FAILED, EXIT_GROUP_LOST
from nightjar.gpu_worker.shards.process import SWITCHES
from nightjar.pipeline.settings import Settings

_EXIT_GRACE_S = 5.0
_REAP_S = 1.0  # between the last file descriptor of a process and its exit status
_LONGEST_LOOK_S = 1.0
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_ENVIRONMENT = {
    # OpenMP threads that spin while they wait take the cores from the workers beside them: on two
    # busy cores decode ran eight times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
    # The ranks of a group are on one machine; nobody else can reach what they say to each other.
    "GLOO_SOCKET_IFNAME": _LOOPBACK,
    "NCCL_SOCKET_IFNAME": _LOOPBACK,
    # Unless told, torch's watchdog of NCCL gives itself a minute to write down what it saw before
    # it ends a process that has waited too long.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    # Numbers of devices are nvidia-smi's; unless told, CUDA counts the fastest first.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """How to start the processes of one model.

    threads: CPU threads of all ranks together.
    kv_cache_bytes: of each rank; None for what the device gets unless told.
    shards: ranks that the model is split among; devices: the CUDA device of each, as this process
    counts those that it sees, or none where all compute on `device`.
    rank_late_after_s: a rank that keeps another waiting or is silent for so long is lost.
    """

    model: Path
    dtype: str = "auto"
    device: str = "cpu"
    kv_cache_bytes: int | None = None
    gpu_memory_share: float = 0.85
    host_cache_bytes: int = 0
    threads: int | None = None
    stalled_after_s: float = 120.0
    load_timeout_s: float = 1800.0
    engine: str = "model"  # or "fake", whose steps take fake_step_s
    fake_step_s: float = 0.0
    shards: int = 1
    devices: tuple[str, ...] = ()
    rank_late_after_s: float = 8.0
    window_steps: int = 8
    cuda_graphs: bool = True
    cuda_prefetch: bool = True
    cuda_small_products: bool = True
    cuda_fused_heads: bool = True
    stamp: str = ""  # of the model's files; a process that finds others does not start

    @classmethod
    def of(cls, settings: Settings, model: Path, stamp: str = "") -> Self:
        """What the settings say about a model's processes."""
        return cls(
            model=model,
            dtype=settings.dtype,
            device=settings.device,
            kv_cache_bytes=settings.kv_cache_bytes,
            gpu_memory_share=settings.gpu_memory_share,
            host_cache_bytes=settings.host_cache_bytes,
            threads=settings.compute_threads,
            stalled_after_s=settings.compute_stalled_after_s,
            engine=settings.engine,
            fake_step_s=settings.fake_step_s,
            shards=settings.shard_count,
            devices=settings.device_list,
            rank_late_after_s=settings.rank_late_after_s,
            window_steps=settings.window_steps,
            cuda_graphs=settings.cuda_graphs,
            cuda_prefetch=settings.cuda_prefetch,
            cuda_small_products=settings.cuda_small_products,
            cuda_fused_heads=settings.cuda_fused_heads,
            stamp=stamp,
        )

    @property
    def ranks(self) -> int:
        """How many processes; a made-up engine needs one."""
        return 1 if self.engine == "fake" else self.shards

    @property
    def threads_per_rank(self) -> int | None:
        """Each rank's share of the threads, or None for what torch takes by itself."""
        if self.ranks == 1:
            return self.threads
        return max(1, (self.threads or _cores()) // self.ranks)

    def command(self, rank: int, pipe: int) -> list[str]:
        """The command line of a rank that speaks over file descriptor `pipe`."""
        module = "compute" if rank == 0 else "shards"
        command = [sys.executable, "-m", f"nightjar.gpu_worker.{module}", f"--model={self.model}"]
        command += [f"--pipe={pipe}", f"--device={'cuda' if self.devices else self.device}"]
        command.append(f"--worker={os.getpid()}")
        command += [f"--without={name}" for name in SWITCHES if not getattr(self, name)]
        if rank == 0:
            command += [f"--dtype={self.dtype}", f"--engine={self.engine}"]
            if self.kv_cache_bytes is not None:
                command.append(f"--kv-cache-bytes={self.kv_cache_bytes}")
            command.append(f"--gpu-memory-share={self.gpu_memory_share}")
            command.append(f"--host-cache-bytes={self.host_cache_bytes}")
            command.append(f"--fake-step-s={self.fake_step_s}")
            command.append(f"--window-steps={self.window_steps}")
            command.append(f"--stamp={self.stamp}")
        threads = self.threads_per_rank
        return command if threads is None else [*command, f"--threads={threads}"]

    def environment(self, rank: int) -> dict[str, str]:
        """The environment of a rank, which sees its own device alone.

        Raises:
            ShardError: This process sees fewer devices.
        """
        own = {_VISIBLE: _visible(int(self.devices[rank]))} if self.devices else {}
        return _ENVIRONMENT | os.environ | own


@dataclass(slots=True)
class _Member:
    """One rank's process, and what is known of it.

    life: where its signs of life come from, until it ends. silent_s: since the last of them.
    late_s: for how long it has stood still while another waited for it.
    """

    rank: int
    process: Process
    life: int | None
    sign: Sign = FIRST_SIGN
    silent_s: float = 0.0
    late_s: float = 0.0
    worked: tuple[int, ...] = ()

    def hear(self, sign: Sign) -> None:
        """Note a sign of life."""
        self.silent_s = 0.0
        if sign != self.sign:
            self.sign, self.late_s = sign, 0.0

    def hear_nothing(self, passed_s: float) -> None:
        """Note that no sign of life came for so long.

        While weights come from a slow disk, a process may hold Python's lock for longer than a step
        may take. Then the system is asked whether the process does anything.
        """
        loads = self.sign.doing is Doing.LOADING and self._is_at_work()
        self.silent_s = 0.0 if loads else self.silent_s + passed_s

    def is_waited_for_by(self, other: "_Member") -> bool:
        """Whether another rank can do nothing until this one moves on."""
        if self.sign.doing is not Doing.WORKING:
            return False
        if self.rank == 0 and other.sign.doing is Doing.AWAITING_COMMAND:
            return True
        return other.sign.position > self.sign.position

    def _is_at_work(self) -> bool:
        """Whether the process has computed since the last call, or waits for a disk."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return True  # the system does not tell
        state, *numbers = stat.rpartition(")")[2].split()
        before, self.worked = self.worked, tuple(map(int, numbers[10:12]))  # user, system time
        return state == "D" or self.worked != before


class ComputeGroup:
    """The processes of one model, started together and ended together."""

    def __init__(self, config: ComputeConfig) -> None:
        self._config = config
        # Made only where ranks meet, because a worker that is killed leaves the directory behind.
        self._meeting = (
            tempfile.TemporaryDirectory(prefix="nightjar-ranks-") if config.ranks > 1 else None
        )
        self._reason: str | None = None
        self._looked_at = time.monotonic()
        self.pipe, theirs = Pipe()
        pairs = [Pipe() for _ in range(config.ranks - 1)]
        pipes = [theirs, *(follower for _, follower in pairs)]
        ends = [leader for leader, _ in pairs]
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
        """File descriptors that signs of life come from; none of a process that is alone."""
        return [member.life for member in self._members if member.life is not None]

    def fault(self, ready: Container[object]) -> str | None:
        """Read the signs of life that are `ready`; return what is wrong with a rank, or None.

        The time between two calls counts only as far as there can be time between two signs. Where
        this process was stopped, too, the silence of a rank means nothing.
        """
        now, limit = time.monotonic(), self._config.rank_late_after_s
        passed, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_S), now
        lives = [(member, member.life) for member in self._members if member.life is not None]
        members = [member for member, _ in lives]
        for member, life in lives:
            if life not in ready:
                member.hear_nothing(passed)
            elif (sign := last_sign(life)) is not None:
                member.hear(sign)
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
        """End every process at once, for this reason."""
        self._reason = reason
        for member in self._members:
            member.process.kill()
        self._close_lives()

    def terminate(self) -> None:
        """Ask every process to end."""
        for member in self._members:
            member.process.terminate()

    def wait(self) -> None:
        """Return when all have ended; rank 0 has a grace period, the others are killed."""
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
        return self._reason or _how(self._members[0].process.returncode)

    def _start(self, rank: int, pipe: Connection, ends: list[Connection]) -> _Member:
        command, descriptors = self._config.command(rank, pipe.fileno()), [pipe.fileno()]
        life, theirs = None, None
        if self._meeting is not None:
            life, theirs = os.pipe()
            descriptors.append(theirs)
            command += [f"--rank={rank}", f"--ranks={self._config.ranks}", f"--life={theirs}"]
            command.append(f"--meeting={Path(self._meeting.name) / 'store'}")
            command.append(f"--patience-s={self._config.rank_late_after_s}")
            if rank == 0:
                numbers = [end.fileno() for end in ends]
                descriptors += numbers
                command.append(f"--followers={','.join(map(str, numbers))}")
        environment = self._config.environment(rank)
        process = start_child(command, environment=environment, descriptors=descriptors)
        if theirs is not None:
            os.close(theirs)
        return _Member(rank, process, life)

    def _blame(self, ended: _Member) -> str:
        """Say which rank ended by itself and how; the others left because of it."""
        try:
            ended.process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return f"of rank {ended.rank} closed its pipes"
        late = [
            member
            for member in self._members
            if member.process.poll() is None and member.late_s > self._config.rank_late_after_s / 2
        ]
        left = [0, EXIT_GROUP_LOST]  # 0: rank 0 has closed its pipe to it
        if late:  # NCCL's watchdog aborts a process that has waited for another
            left.append(-signal.SIGABRT)
        deadline = time.monotonic() + _REAP_S
        while True:
            for member in self._members:
                status = member.process.poll()
                if status is not None and status not in left:
                    return f"of rank {member.rank} {_how(status)}"
            if late:
                return self._late(late)
            if time.monotonic() > deadline:
                return f"of rank {ended.rank} lost the others: see the log"
            time.sleep(_REAP_S / 20)  # the rank that made this one leave may still be ending

    def _late(self, members: "list[_Member]") -> str:
        """Say which of the ranks that kept others waiting is to blame: the one furthest behind."""
        least = min(members, key=lambda member: member.sign.position)
        limit = self._config.rank_late_after_s
        return f"of rank {least.rank} stalled: the others waited {limit:g} s"

    def _close_lives(self) -> None:
        for member in self._members:
            if member.life is not None:
                os.close(member.life)
                member.life = None


def _visible(number: int) -> str:
    """CUDA's name of the device with this number among those that this process sees."""
    listed = os.environ.get(_VISIBLE)
    if listed is None:
        return f"{number}"
    # Numbers, or the names of devices and of parts of them; CUDA takes what is before a -1.
    names = [name.strip() for name in listed.split(",")]
    names = names[: names.index("-1")] if "-1" in names else [name for name in names if name]
    if number >= len(names):
        raise ShardError(
            f"device {number}: {_VISIBLE}={listed} shows {len(names)} devices to this process, and "
            "NIGHTJAR_DEVICES (--devices) counts those from 0"
        )
    return names[number]


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # where a container may have fewer than the machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _how(status: int) -> str:
    """Say, as a verb, how a rank with this status ended."""
    if status == EXIT_FAILED:
        return "ended by an error of its own: see the log"
    return how_ended(status)
