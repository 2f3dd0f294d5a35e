"""A rank that carries out rank 0's commands, in a process of its own (`__main__.py`).

It ends when rank 0 ends, because the pipe closes. An error here ends it too, since the others go
on. The launcher notices that and starts the group again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import Decoder, KVTensors, load_model
from nightjar.gpu_worker.models.shard import Collective, ShardDecoder
from nightjar.gpu_worker.models.split import Part
from nightjar.gpu_worker.shards.activity import Doing
from nightjar.gpu_worker.shards.collective import require_device
from nightjar.gpu_worker.shards.commands import (
    Allocate,
    Clear,
    Command,
    Copy,
    Done,
    Forward,
    Keep,
    Load,
    Logits,
    TokenNll,
    batch_of,
    decode_command,
    encode,
    tensor_of,
)
from nightjar.gpu_worker.shards.process import GroupMember
from nightjar.kernels.device import free_bytes, use_device, warm_up
from nightjar.process import spare_what_stays

logger = logging.getLogger(__name__)


class Follower:
    """Computes one rank's part of every model that rank 0 has loaded.

    Args:
        model: The model's directory.
        member: This rank and the number of ranks.
        device: Where this rank computes.
        pipe: From rank 0.
        join: Connects to the other ranks when all have loaded; called once.
    """

    def __init__(
        self,
        model: Path,
        member: GroupMember,
        device: str,
        pipe: Connection,
        join: Callable[[], Collective],
    ) -> None:
        self._model = model
        self._rank = member.rank
        self._ranks = member.ranks
        self._device = device
        self._pipe = pipe
        self._join = join
        self._activity = member.activity
        self._done: torch.cuda.Event | None = None
        self._activity.is_computing = self._is_computing
        self._loaded: tuple[Decoder, Part] | None = None
        self._collective: Collective | None = None
        self._models: list[ShardDecoder] = []
        self._caches: dict[int, KVTensors] = {}

    @torch.inference_mode()
    def run(self) -> None:
        """Carry out commands until rank 0 closes the pipe."""
        while True:
            try:
                with self._activity.waiting(Doing.AWAITING_COMMAND):
                    frame = self._pipe.recv_bytes()
            except (EOFError, ConnectionError):
                return
            with self._activity.command():
                self._obey(decode_command(frame))
                self._mark()

    def _obey(self, command: Command) -> None:
        match command:
            case Load():
                with self._activity.loading():
                    self._say(Done(self._load(command.dtype)))
            case Keep():
                with self._activity.loading():  # to connect may take longer than a step
                    self._keep()
                on_cpu = self._device == "cpu"
                self._say(Done(free_bytes=None if on_cpu else free_bytes(self._device)))
            case Allocate():
                with self._activity.loading():
                    self._say(Done(self._allocate(command)))
            case Clear():
                self._caches[command.model].clear(command.blocks)
            case Copy():
                self._caches[command.model].copy(command.pairs)
            case Forward():
                self._forward(command)
            case Logits():
                model = self._models[command.model]
                model.logits(self._broadcast(model, command.rows, model.dtype))
            case TokenNll():
                model = self._models[command.model]
                rows, targets = (
                    tensor_of(x, self._device) for x in (command.rows, command.targets)
                )
                hidden = self._broadcast(model, command.count, model.dtype)
                model.token_nll(hidden, rows, targets)

    def _mark(self) -> None:
        """Mark the end of the work that the device has been given."""
        if self._device != "cpu" and self._models:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            self._done = done

    def _is_computing(self) -> bool:
        """Return whether the device has not reached the last mark."""
        return self._done is not None and not self._done.query()  # type: ignore[no-untyped-call]

    def _load(self, dtype: str) -> str | None:
        """Load this rank's part; return why that failed, or None."""
        self._loaded = None
        try:
            require_device(self._device, self._rank)
            use_device(self._device)
            warm_up()
            directory = ModelDirectory.open(self._model)
            part = Part.of(directory.config, self._rank, self._ranks)
            self._loaded = load_model(directory, dtype, self._device, part), part
        except Exception as error:
            logger.exception("rank %d cannot load its part", self._rank)
            return f"{type(error).__name__}: {error}"
        return None

    def _allocate(self, command: Allocate) -> str | None:
        """Make a model's cache; return why that failed, or None."""
        model = self._models[command.model]
        try:
            shape = command.blocks, command.block_size
            cache = model.allocate_cache(*shape, fp8=command.fp8)
        except Exception as error:
            logger.exception("rank %d cannot make its cache", self._rank)
            return f"{type(error).__name__}: {error}"
        self._caches[command.model] = cache
        return None

    def _say(self, done: Done) -> None:
        self._pipe.send_bytes(encode(done))

    def _keep(self) -> None:
        if self._loaded is None:
            raise RuntimeError("rank 0 keeps a model that was not loaded")
        if self._collective is None:
            self._collective = self._join()
        self._models.append(ShardDecoder(*self._loaded, self._collective))
        self._loaded = None
        spare_what_stays()

    def _forward(self, command: Forward) -> None:
        model, batch = self._models[command.model], batch_of(command, self._device)
        if command.vectors:
            vectors = self._broadcast(model, command.vectors, torch.float32)
            batch = replace(batch, prompt_vectors=vectors)
        model.forward(batch, self._caches[command.model])

    @staticmethod
    def _broadcast(model: ShardDecoder, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Receive rows [n, H] that rank 0 sends to all: hidden states or prompt vectors."""
        shape = (rows, model.config.hidden_size)
        return model.collective.broadcast(torch.empty(shape, dtype=dtype, device=model.device))
