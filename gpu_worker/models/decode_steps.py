"""Decode steps that follow each other on the device: forward pass, sampler and step update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nightjar import kernels
from nightjar.gpu_worker.models.batch import KVTensors, TokenBatch
from nightjar.gpu_worker.models.decode_state import (
    DeviceBatch,
    SeenTokens,
    Shape,
    WindowInput,
    token_texts,
)
from nightjar.gpu_worker.models.graphs import WARM_UPS, Recorder, Step, eager
from nightjar.gpu_worker.models.padded_steps import ForwardModel, PaddedSteps, most_step_bytes
from nightjar.kernels import Column, PagedTensors

SHAPES_HELD = 64
"""Most shapes of a step that keep their tensors and their graph."""


class StepModel(ForwardModel, Protocol):
    """What a step needs of a decoder; see Decoder."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the scores of all tokens: [N, H] -> float32[N, V]."""

    def recorder(self, most_bytes: int) -> Recorder:
        """Return what records steps on a GPU; a step takes up to so many bytes meanwhile."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings of decode steps.

    token_bytes: the raw bytes of each token; banned_token_ids: ids that are never sampled.
    slots: the most that a batch may have; window_steps: the most of a window.
    cuda_graphs: record steps on a GPU, those of windows and those that the host packs.
    """

    token_bytes: Sequence[bytes]
    banned_token_ids: Sequence[int]
    slots: int
    block_size: int
    window_steps: int
    cuda_graphs: bool


class DecodeSteps:
    """Runs the decode steps of a window on the device.

    The device knows all that a step needs, and finds out itself which sequences end. Every draw
    depends on the request's seed, the sample and the step alone. So the ranks of one model, given
    the same windows, choose the same tokens.

    record: makes a step cheaper to launch; it is used once for each shape that is held.
    """

    def __init__(self, model: StepModel, cache: KVTensors, settings: StepSettings) -> None:
        self._model = model
        self._cache = cache
        self._settings = settings
        recorded = settings.cuda_graphs and cache.keys.is_cuda
        sizes = model.config, model.dtype, model.cache_dtype, settings.slots
        self.record: Recorder = model.recorder(most_step_bytes(*sizes)) if recorded else eager
        self.padded = PaddedSteps(model, cache, settings.slots)
        banned = sorted(set(settings.banned_token_ids))
        self._banned = torch.tensor(banned, dtype=torch.int64, device=model.device)
        self._texts = token_texts(settings.token_bytes, model.device)
        self._seen = SeenTokens.allocate(settings.slots, model.config.vocab_size, model.device)
        self._held: dict[Shape, tuple[DeviceBatch, Step]] = {}  # the least recently used first
        self._shape: Shape | None = None

    @property
    def batch(self) -> DeviceBatch:
        """The device's tensors of the last window.

        Raises:
            RuntimeError: There was none.
        """
        return self._current[0]

    @property
    def shapes_held(self) -> int:
        """How many shapes of a step have tensors and, where steps are captured, a graph."""
        return len(self._held)

    @torch.inference_mode()
    def run(self, window: WindowInput) -> None:
        """Queue the steps of a window on the device; `batch.tokens` are what they choose."""
        if window.batch is not None:
            self._use(window.batch.shape)
            self.batch.load(window.batch)
        self.batch.load_tables(window.tables)
        self.launch(window.steps)

    @torch.inference_mode()
    def forward(self, batch: TokenBatch) -> Tensor:
        """Run a single step of the host, which is in its memory: see PaddedSteps.forward."""
        return self.padded.forward(batch, self.record)

    def launch(self, steps: int) -> None:
        """Queue so many steps of the loaded batch."""
        batch, step = self._current
        batch.step.zero_()
        for _ in range(steps):
            step()

    @property
    def _current(self) -> tuple[DeviceBatch, Step]:
        if self._shape is None:
            raise RuntimeError("a window without sequences")
        return self._held[self._shape]

    def _use(self, shape: Shape) -> None:
        """Make the tensors of a shape the current ones; its step is recorded when first needed.

        A new shape may take the place of the least recently used one.  No window is in flight then.
        """
        if shape in self._held:
            self._held[shape] = self._held.pop(shape)
        else:
            steps = max(self._settings.window_steps, WARM_UPS + 1)
            batch = DeviceBatch.allocate(shape, self._seen, steps, self._settings.block_size)
            self._held[shape] = batch, self.record(lambda: self._step(batch))
            if len(self._held) > SHAPES_HELD:
                del self._held[next(iter(self._held))]
        self._shape = shape

    def _step(self, batch: DeviceBatch) -> None:
        """Compute one decode step.  The host must not read a number of the device here."""
        state, draws, penalties = batch.state, batch.draws, batch.penalties
        ids, positions, blocks, offsets = state.inputs.unbind(0)
        rows = TokenBatch(
            token_ids=ids,
            positions=positions,
            vector_bases=positions,  # not read: there are no prompt vectors
            prompt_vectors=None,
            write_blocks=blocks,
            write_offsets=offsets,
            prefill=None,
            decode=PagedTensors(state.block_tables, state.attention_lengths),
            branch=None,
            output_rows=None,
        )
        logits = self._model.logits(self._model.forward(rows, self._cache))
        if self._banned.numel():
            logits.index_fill_(1, self._banned, float("-inf"))
        kernels.penalize(
            logits,
            state.seen,
            state.counts,
            penalties.repetition,
            penalties.presence,
            penalties.frequency,
        )
        steps = state.rows[:, Column.GENERATED].to(torch.int64)
        tokens = draws.draw(logits, steps)
        batch.tokens.index_copy_(0, batch.step, tokens.unsqueeze(0))
        batch.step.add_(1)
        kernels.step_update(tokens, state, self._texts, batch.stops, self._settings.block_size)
