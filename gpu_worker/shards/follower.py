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
from nightjar.gpu_worker.models.decode_steps import DecodeSteps
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
    MakeSteps,
    Preparation,
    TokenNll,
    Window,
    Work,
    batch_of,
    decode_command,
    encode,
    settings_of,
    tensor_of,
    window_input_of,
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
        self._steps: dict[int, DecodeSteps] = {}

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
            case Load() | Keep() | Allocate() | MakeSteps():
                with self._activity.loading():  # to connect may take longer than a step
                    done = self._prepare(command)
                self._pipe.send_bytes(encode(done))
            case _:
                self._compute(command)

    def _prepare(self, command: Preparation) -> Done:
        match command:
            case Load():
                return Done(self._load(command.dtype))
            case Keep():
                self._keep()
                on_cpu = self._device == "cpu"
                return Done(free_bytes=None if on_cpu else free_bytes(self._device))
            case Allocate():
                return Done(self._make("its cache", lambda: self._allocate(command)))
            case MakeSteps():
                return Done(self._make("its steps", lambda: self._make_steps(command)))

    def _compute(self, command: Work) -> None:
        match command:
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
            case Window():
                self._steps[command.model].run(window_input_of(command))

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

    def _make(self, what: str, make: Callable[[], None]) -> str | None:
        """Make something of a model; return why that failed, or None."""
        try:
            make()
        except Exception as error:
            logger.exception("rank %d cannot make %s", self._rank, what)
            return f"{type(error).__name__}: {error}"
        return None

    def _allocate(self, command: Allocate) -> None:
        model, shape = self._models[command.model], (command.blocks, command.block_size)
        self._caches[command.model] = model.allocate_cache(*shape, fp8=command.fp8)

    def _make_steps(self, command: MakeSteps) -> None:
        model, cache = self._models[command.model], self._caches[command.model]
        self._steps[command.model] = model.decode_steps(cache, settings_of(command))

    def _keep(self) -> None:
        if self._loaded is None:
            raise RuntimeError("rank 0 keeps a model that was not loaded")
        if self._collective is None:
            self._collective = self._join()
        self._models.append(ShardDecoder(*self._loaded, self._collective))
        self._loaded = None
        spare_what_stays()

    def _forward(self, command: Forward) -> None:
        model, steps = self._models[command.model], self._steps.get(command.model)
        batch = batch_of(command, self._device if steps is None else "cpu")
        if command.vectors:
            vectors = self._broadcast(model, command.vectors, torch.float32)
            batch = replace(batch, prompt_vectors=vectors)
        if steps is None:
            model.forward(batch, self._caches[command.model])
        else:
            steps.forward(batch)

    @staticmethod
    def _broadcast(model: ShardDecoder, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Receive rows [n, H] that rank 0 sends to all: hidden states or prompt vectors."""
        shape = (rows, model.config.hidden_size)
        return model.collective.broadcast(torch.empty(shape, dtype=dtype, device=model.device))
