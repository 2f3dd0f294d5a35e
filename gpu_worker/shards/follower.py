"""A rank that follows, `python -m nightjar.gpu_worker.shards.follower`: it carries out commands.

It ends when rank 0 does: the pipe closes. What fails here ends it too, since the others go on: the
launcher sees it and starts the group again.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Never

import torch

from nightjar import logs
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import Decoder, KVTensors, load_model
from nightjar.gpu_worker.models.shard import Collective, ShardDecoder
from nightjar.gpu_worker.models.split import Part
from nightjar.gpu_worker.shards.collective import TorchCollective, require_device
from nightjar.gpu_worker.shards.commands import (
    Allocate,
    Clear,
    Command,
    Copy,
    Forward,
    Keep,
    Load,
    Loaded,
    Logits,
    TokenNll,
    batch_of,
    decode_command,
    encode,
    tensor_of,
)
from nightjar.gpu_worker.shards.process import (
    add_place_arguments,
    give_signs_of_life,
    leave,
    leaving_when_lost,
    live_no_longer_than_the_worker,
    place_of,
)
from nightjar.kernels.cuda.device import use_device
from nightjar.kernels.native.build import library
from nightjar.process import keep_freed_memory, spare_what_stays

logger = logging.getLogger(__name__)


class Follower:
    """Computes one rank's part of every model that rank 0 has loaded.

    Args:
        model: Its directory.
        rank, ranks: Which part.
        device: Where this rank computes.
        pipe: From rank 0.
        join: Meets the others, when all have loaded; called once.
    """

    def __init__(
        self,
        model: Path,
        rank: int,
        ranks: int,
        device: str,
        pipe: Connection,
        join: Callable[[], Collective],
    ) -> None:
        self._model = model
        self._rank = rank
        self._ranks = ranks
        self._device = device
        self._pipe = pipe
        self._join = join
        self._loaded: tuple[Decoder, Part] | None = None
        self._collective: Collective | None = None
        self._models: list[ShardDecoder] = []
        self._caches: dict[int, KVTensors] = {}

    @torch.inference_mode()
    def run(self) -> None:
        """Carry out commands until rank 0 closes the pipe."""
        while True:
            try:
                frame = self._pipe.recv_bytes()
            except (EOFError, ConnectionError):
                return
            self._obey(decode_command(frame))

    def _obey(self, command: Command) -> None:
        match command:
            case Load():
                self._pipe.send_bytes(encode(Loaded(self._load(command.dtype))))
            case Keep():
                self._keep()
            case Allocate():
                model = self._models[command.model]
                cache = model.allocate_cache(command.blocks, command.block_size)
                self._caches[command.model] = cache
            case Clear():
                self._caches[command.model].clear(command.blocks)
            case Copy():
                self._caches[command.model].copy(command.pairs)
            case Forward():
                batch = batch_of(command, self._device)
                self._models[command.model].forward(batch, self._caches[command.model])
            case Logits():
                model = self._models[command.model]
                model.logits(self._hidden(model, command.rows))
            case TokenNll():
                model = self._models[command.model]
                rows, targets = (
                    tensor_of(x, self._device) for x in (command.rows, command.targets)
                )
                model.token_nll(self._hidden(model, command.count), rows, targets)

    def _load(self, dtype: str) -> str | None:
        """Load this rank's part; returns why that cannot be done."""
        self._loaded = None
        try:
            require_device(self._device, self._rank)
            use_device(self._device)
            library()  # compiled now, not in the first step
            directory = ModelDirectory.open(self._model)
            part = Part.of(directory.config, self._rank, self._ranks)
            self._loaded = load_model(directory, dtype, self._device, part), part
        except Exception as error:
            logger.exception("rank %d cannot load its part", self._rank)
            return f"{type(error).__name__}: {error}"
        return None

    def _keep(self) -> None:
        if self._loaded is None:
            raise RuntimeError("rank 0 keeps a model that was not loaded")
        if self._collective is None:
            self._collective = self._join()
        self._models.append(ShardDecoder(*self._loaded, self._collective))
        self._loaded = None
        spare_what_stays()

    @staticmethod
    def _hidden(model: ShardDecoder, rows: int) -> torch.Tensor:
        """Hidden states that rank 0 sends to all."""
        shape = (rows, model.config.hidden_size)
        return model.collective.broadcast(
            torch.empty(shape, dtype=model.dtype, device=model.device)
        )


def main() -> Never:
    """Entry point: follow rank 0 until it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--pipe", type=int, required=True, help="file descriptor from rank 0")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of torch")
    add_place_arguments(parser)
    args = parser.parse_args()
    live_no_longer_than_the_worker()
    place = place_of(args)
    logs.configure(f"compute rank {place.rank}")
    give_signs_of_life(place.life)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    join = partial(TorchCollective, place, args.device)
    keep_freed_memory()
    with leaving_when_lost():
        pipe = Connection(args.pipe)
        Follower(args.model, place.rank, place.ranks, args.device, pipe, join).run()
    leave(0)


if __name__ == "__main__":
    main()
