"""Ranks of one model in threads of one process: the arithmetic of shards without the processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe

import torch
from torch import Tensor

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.shards.follower import Follower
from nightjar.gpu_worker.shards.leader import Leader

PATIENCE_S = 60


class Meeting:
    """Where the threads of one model exchange tensors."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks)
        self._brought: list[Tensor] = [torch.empty(0)] * ranks

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """What every rank brings, in the order of the ranks."""
        self._brought[rank] = x.clone()
        self._barrier.wait(PATIENCE_S)
        found = list(self._brought)
        self._barrier.wait(PATIENCE_S)
        return found


class ThreadCollective:
    """A Collective between threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    def sum(self, x: Tensor) -> Tensor:
        parts = self._meeting.exchange(self._rank, x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = self._meeting.exchange(self._rank, x)
        return parts if self._rank == 0 else []

    def broadcast(self, x: Tensor) -> Tensor:
        return self._meeting.exchange(self._rank, x)[0]


@contextmanager
def thread_leader(directory: ModelDirectory, ranks: int) -> Iterator[Leader]:
    """Rank 0 of a model, whose other ranks follow in threads."""
    meeting = Meeting(ranks)
    pipes = [Pipe() for _ in range(ranks - 1)]
    followers = [
        Follower(directory.path, rank, ranks, "cpu", theirs, _join(meeting, rank))
        for rank, (_, theirs) in enumerate(pipes, 1)
    ]
    threads = [threading.Thread(target=follower.run) for follower in followers]
    for thread in threads:
        thread.start()
    try:
        yield Leader(directory, [ours for ours, _ in pipes], "cpu", _join(meeting, 0))
    finally:
        for ours, _ in pipes:
            ours.close()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)


def _join(meeting: Meeting, rank: int) -> Callable[[], ThreadCollective]:
    return lambda: ThreadCollective(meeting, rank)
