"""Rank 0's side: a decoder for the engine, each call of which every rank carries out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TypeVar

from torch import Tensor

from nightjar import kernels
from nightjar.checkpoints import ModelDirectory, ShardError
from nightjar.gpu_worker.models import Decoder, KVTensors, TokenBatch, load_model
from nightjar.gpu_worker.models.decode_state import WindowInput
from nightjar.gpu_worker.models.decode_steps import DecodeSteps, StepSettings
from nightjar.gpu_worker.models.shard import Collective, ShardDecoder
from nightjar.gpu_worker.models.split import Part
from nightjar.gpu_worker.shards.activity import Activity
from nightjar.gpu_worker.shards.commands import (
    Allocate,
    Clear,
    Command,
    Copy,
    Done,
    Keep,
    Load,
    Logits,
    TokenNll,
    decode_done,
    encode,
    forward_of,
    ids_of,
    steps_of,
    window_of,
)
from nightjar.gpu_worker.shards.process import GroupLostError, OutOfStepError

Own = TypeVar("Own")


class RankZero:
    """Sends commands to the ranks that follow.

    Args:
        directory: The model.
        followers: A pipe to each of ranks 1, 2, ...
        device: Where this rank computes.
        join: Connects to the other ranks when all have loaded; called once.
        activity: Of this rank.
    """

    def __init__(
        self,
        directory: ModelDirectory,
        followers: Sequence[Connection],
        device: str,
        join: Callable[[], Collective],
        activity: Activity,
    ) -> None:
        self._directory = directory
        self._followers = list(followers)
        self._device = device
        self._join = join
        self._activity = activity
        self._collective: Collective | None = None
        self._models = 0

    def load(self, dtype: str) -> ShardDecoder:
        """Load the model in a precision on every rank; return rank 0's part.

        Each call of the returned decoder is carried out by every rank.

        Raises:
            ShardError: The model cannot be split so, or another rank cannot load its part.
            CheckpointError: Rank 0 cannot load its own part.
        """
        part = Part.of(self._directory.config, 0, len(self._followers) + 1)
        own, _ = self.ask(
            Load(dtype),
            "load its part",
            lambda: load_model(self._directory, dtype, self._device, part),
        )
        collective, done = self.ask(Keep(), "meet the others", self._met)
        self._models += 1
        model = _LeadingDecoder(own, part, collective, self, self._models - 1)
        model.free_elsewhere = tuple(x.free_bytes for x in done if x.free_bytes is not None)
        return model

    @contextmanager
    def together(self, command: Command) -> Iterator[None]:
        """Send a command to the other ranks; the caller does the same meanwhile.

        Raises:
            OutOfStepError: This rank failed; the others may wait for it for ever.
            GroupLostError: Another rank does not read its pipe.
        """
        with self._activity.command():
            self.tell(command)
            try:
                yield
            except Exception as error:
                raise OutOfStepError(f"rank 0 failed in {type(command).__name__}") from error

    def tell(self, command: Command) -> None:
        """Send a command to every other rank.

        Raises:
            GroupLostError: Another rank does not read its pipe.
        """
        frame = encode(command)
        try:
            for pipe in self._followers:
                pipe.send_bytes(frame)
        except OSError as error:
            raise GroupLostError(f"another rank does not listen: {error}") from error

    def ask(self, command: Command, purpose: str, own: Callable[[], Own]) -> tuple[Own, list[Done]]:
        """Send a command that may fail, and do this rank's own part meanwhile.

        Returns:
            The result of the own part, and the answers of the other ranks.

        Raises:
            ShardError: Another rank failed; all ranks are still in step.
            GroupLostError: Another rank has ended.
        """
        with self._activity.loading(), self._activity.command():
            self.tell(command)
            try:
                found = own()
            except Exception:
                self._answers()
                raise
            answers = self._answers()
        for rank, answer in enumerate(answers, 1):
            if answer.error is not None:
                raise ShardError(f"rank {rank} cannot {purpose}: {answer.error}")
        return found, answers

    def _met(self) -> Collective:
        if self._collective is None:
            self._collective = self._join()
        return self._collective

    def _answers(self) -> list[Done]:
        """Read the answer of each other rank."""
        try:
            return [decode_done(pipe.recv_bytes()) for pipe in self._followers]
        except (EOFError, OSError) as error:
            raise GroupLostError("another rank ended in a command that it was to answer") from error


def _with_vectors(model: ShardDecoder, batch: TokenBatch) -> TokenBatch:
    """Return the batch with its prompt vectors on the device; every rank gets them."""
    if batch.prompt_vectors is None:
        return batch
    vectors = kernels.upload(batch.prompt_vectors, model.device)
    return replace(batch, prompt_vectors=model.collective.broadcast(vectors))


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankZeroCache(KVTensors):
    """Rank 0's part of a cache; every rank copies and clears the same blocks."""

    rank_zero: RankZero
    model: int

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            with self.rank_zero.together(Copy(self.model, pairs)):
                KVTensors.copy(self, pairs)

    def clear(self, blocks: list[int]) -> None:
        if blocks:
            with self.rank_zero.together(Clear(self.model, blocks)):
                KVTensors.clear(self, blocks)


class _LeadingSteps(DecodeSteps):
    """Rank 0's decode steps; every rank runs the same windows.

    The ranks choose the same tokens, so nothing is sent in a window.
    """

    def __init__(
        self,
        own: ShardDecoder,
        cache: KVTensors,
        settings: StepSettings,
        rank_zero: RankZero,
        model: int,
    ) -> None:
        super().__init__(own, cache, settings)
        self._own = own
        self._rank_zero = rank_zero
        self._number = model

    def run(self, window: WindowInput) -> None:
        with self._rank_zero.together(window_of(self._number, window)):
            super().run(window)

    def forward(self, batch: TokenBatch) -> Tensor:
        with self._rank_zero.together(forward_of(self._number, batch)):
            return super().forward(_with_vectors(self._own, batch))


class _LeadingDecoder(ShardDecoder):
    """Rank 0's part of a model; every rank carries out each of its calls."""

    def __init__(
        self, own: Decoder, part: Part, collective: Collective, rank_zero: RankZero, model: int
    ) -> None:
        super().__init__(own, part, collective)
        self._own = own
        self._rank_zero = rank_zero
        self._model = model

    def allocate_cache(self, blocks: int, block_size: int, *, fp8: bool = False) -> KVTensors:
        def make() -> KVTensors:
            try:
                return super(_LeadingDecoder, self).allocate_cache(blocks, block_size, fp8=fp8)
            except (MemoryError, RuntimeError) as error:  # torch's own is the latter
                raise ShardError(f"rank 0 cannot make its cache: {error}") from error

        command = Allocate(self._model, blocks, block_size, fp8)
        own, _ = self._rank_zero.ask(command, "make its cache", make)
        return _RankZeroCache(
            own.keys, own.values, own.scales, rank_zero=self._rank_zero, model=self._model
        )

    def decode_steps(self, cache: KVTensors, settings: StepSettings) -> DecodeSteps:
        own = ShardDecoder(self._own, self.part, self.collective)

        def make() -> DecodeSteps:
            try:
                return _LeadingSteps(own, cache, settings, self._rank_zero, self._model)
            except (MemoryError, RuntimeError) as error:
                raise ShardError(f"rank 0 cannot make its steps: {error}") from error

        command = steps_of(self._model, settings)
        steps, _ = self._rank_zero.ask(command, "make its steps", make)
        return steps

    def forward(self, batch: TokenBatch, cache: KVTensors) -> Tensor:
        with self._rank_zero.together(forward_of(self._model, batch)):
            return super().forward(_with_vectors(self, batch), cache)

    def logits(self, hidden: Tensor) -> Tensor:
        with self._rank_zero.together(Logits(self._model, hidden.shape[0])):
            return super().logits(self.collective.broadcast(hidden))

    def token_nll(self, hidden: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        command = TokenNll(self._model, hidden.shape[0], ids_of(rows), ids_of(targets))
        with self._rank_zero.together(command):
            return super().token_nll(self.collective.broadcast(hidden), rows, targets)
