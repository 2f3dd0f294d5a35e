"""Sums and exchanges between the processes of one model, through torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from nightjar.checkpoints import ShardError
from nightjar.gpu_worker.shards.process import GroupLostError, GroupMember

START_S = 120.0
"""Seconds that the ranks have to connect, if that is more than `GroupMember.patience_s`.

A machine that still reads weights is slow, and NCCL examines every GPU and every link first. Both
may take longer than a step may take.
"""


class TorchCollective:
    """A Collective over NCCL on GPUs and gloo on the CPU; one in each process.

    Every call is made by all ranks. A rank that comes later than `GroupMember.patience_s` after the
    first is lost. For connecting, the limit is START_S.
    """

    def __init__(self, member: GroupMember, device: str) -> None:
        """Connect to the other ranks, which must connect at the same time."""
        self._ranks = member.ranks
        self._on_cpu = device == "cpu"
        self.is_recordable = not self._on_cpu  # NCCL's exchanges are kernels
        self._activity = member.activity
        store = dist.FileStore(str(member.meeting), member.ranks)  # type: ignore[attr-defined]
        own = None if self._on_cpu else torch.device("cuda", torch.cuda.current_device())
        backend = "gloo" if self._on_cpu else "nccl"
        with self._exchange():
            dist.init_process_group(
                backend,
                store=store,
                rank=member.rank,
                world_size=member.ranks,
                timeout=timedelta(seconds=max(START_S, member.patience_s)),
                device_id=own,
            )
        # NCCL connects and takes its memory at its first use. That is now, not in the first step.
        self.sum(torch.zeros(1, device=own))
        if own is not None:
            torch.cuda.synchronize(own)
        patience = timedelta(seconds=member.patience_s)
        dist.distributed_c10d._set_pg_timeout(patience)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks.

        On the CPU, the order of the sum is the order of the ranks. So the bits of a row depend
        neither on its index nor on the other rows of the batch.

        All-reduce gives that for two ranks. For more, gloo begins with another rank in each piece
        of the tensor. So the ranks exchange the pieces, each rank sums one piece in order, and all
        share the sums.
        """
        x = x.contiguous()
        with self._exchange():
            if self._ranks == 2 or not self._on_cpu:
                dist.all_reduce(x)
                return x
            return self._ordered_sum(x)

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's x, one after another: [ranks, *x.shape]."""
        gathered = x.new_empty(self._ranks * x.numel())
        with self._exchange():
            dist.all_gather_single(gathered, x.flatten())
        return gathered.view(self._ranks, *x.shape)

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's x."""
        x = x.contiguous()
        with self._exchange():
            dist.broadcast(x, src=0)
        return x

    def close(self) -> None:
        """Disconnect from the other ranks.  NCCL waits until no CUDA graph holds its exchanges."""
        dist.destroy_process_group()

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Count a call that all ranks make, and notice that a rank is lost in it.

        A call that a CUDA graph records exchanges nothing. Its failure is the recording's.
        """
        if self.is_recordable and torch.cuda.is_current_stream_capturing():
            yield
            return
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
    """Raise ShardError if a rank's CUDA device does not exist."""
    if device != "cpu" and not torch.cuda.is_available():
        number = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        raise ShardError(
            f"rank {rank}: CUDA device {number} is not there (torch {torch.__version__}, {build}); "
            "name devices that are (--devices, NIGHTJAR_DEVICES), or none to compute on the CPU"
        )


@contextmanager
def _or_lost() -> Iterator[None]:
    """Raise GroupLostError if a call fails: another rank has ended or did not come in time."""
    try:
        yield
    except RuntimeError as error:
        raise GroupLostError(f"another rank is gone or late: {error}") from error
