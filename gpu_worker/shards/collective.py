"""Sums and exchanges between the processes of one model, over torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from nightjar.checkpoints import ShardError
from nightjar.gpu_worker.shards.process import GroupLostError, Place

START_S = {"nccl": 120.0, "gloo": 0.0}
"""Seconds that the ranks have to connect, if that is more than `Place.patience_s`.  NCCL looks at
every GPU and every link of the machine first: eight of them may take longer than a step may."""


class TorchCollective:
    """A Collective over NCCL on GPUs and gloo on the CPU; one a process.

    A rank that comes to a call later than `Place.patience_s` after the first is taken for lost.
    Connecting has START_S of its own.
    """

    def __init__(self, place: Place, device: str) -> None:
        """Meets the others; they must be about to do the same."""
        self._rank = place.rank
        self._ranks = place.ranks
        self._on_cpu = device == "cpu"
        self._activity = place.activity
        store = dist.FileStore(str(place.meeting), place.ranks)  # type: ignore[attr-defined]
        own = None if self._on_cpu else torch.device("cuda", torch.cuda.current_device())
        backend = "gloo" if self._on_cpu else "nccl"
        with self._exchange():
            dist.init_process_group(
                backend,
                store=store,
                rank=place.rank,
                world_size=place.ranks,
                timeout=timedelta(seconds=max(START_S[backend], place.patience_s)),
                device_id=own,
            )
        # NCCL connects, and takes memory for that, when first used: now, not in the first step.
        self.sum(torch.zeros(1, device=own))
        if own is not None:
            torch.cuda.synchronize(own)
        patience = timedelta(seconds=place.patience_s)
        dist.distributed_c10d._set_pg_timeout(patience)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks: on the CPU always in their order, so that a row's bits depend
        neither on its place nor on its company.

        All-reduce gives that for two numbers. For more, gloo begins with another rank in each piece
        of the tensor; so the pieces are exchanged, summed in order by one rank each, and shared.
        """
        x = x.contiguous()
        with self._exchange():
            if self._ranks == 2 or not self._on_cpu:
                dist.all_reduce(x)
                return x
            return self._ordered_sum(x)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x on rank 0."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self._ranks)] if self._rank == 0 else None
        with self._exchange():
            dist.gather(x, parts, dst=0)
        return parts or []

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x."""
        x = x.contiguous()
        with self._exchange():
            dist.broadcast(x, src=0)
        return x

    def close(self) -> None:
        """Leave the others."""
        dist.destroy_process_group()

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """A call that all ranks make."""
        self._activity.exchanges()
        with _or_lost():
            yield

    def _ordered_sum(self, x: Tensor) -> Tensor:
        piece = -(-x.numel() // self._ranks)
        padded = x.new_zeros(self._ranks * piece)
        padded[: x.numel()] = x.flatten()
        theirs = torch.empty_like(padded)
        dist.all_to_all_single(theirs, padded)
        first, *others = theirs.view(self._ranks, piece).to(
            torch.promote_types(x.dtype, torch.float32)
        )
        total = first
        for part in others:
            total = total.add_(part)
        dist.all_gather(list(padded.view(self._ranks, piece)), total.to(x.dtype))
        return padded[: x.numel()].view(x.shape)


def require_device(device: str, rank: int) -> None:
    """Raises ShardError where a rank's CUDA device is not there."""
    if device != "cpu" and not torch.cuda.is_available():
        number = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        raise ShardError(
            f"rank {rank}: CUDA device {number} is not there (torch {torch.__version__}, {build}); "
            "name devices that are (--devices, NIGHTJAR_DEVICES), or none to compute on the CPU"
        )


@contextmanager
def _or_lost() -> Iterator[None]:
    """A call that fails has met a rank that is gone, or that did not come in time."""
    try:
        yield
    except RuntimeError as error:
        raise GroupLostError(f"another rank is gone or late: {error}") from error
