"""Steps that the host packs, on a GPU: computed in padded shapes, and recorded where they recur."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from nightjar import kernels
from nightjar.checkpoints import ModelConfig
from nightjar.gpu_worker.models.batch import KVTensors, TokenBatch
from nightjar.gpu_worker.models.graphs import NotRecordedError, Recorder, Step
from nightjar.gpu_worker.models.padded_batch import (
    MOST_CHUNKS,
    MOST_DECODE_POSITIONS,
    MOST_PROMPT_ROWS,
    PaddedBatch,
    StepShape,
    padded,
    shape_of,
)

RECORDED_AT = 3
"""The use of a shape at which it is recorded.  To record takes as long as about four uses."""

RECORDINGS_HELD = 64
"""Most shapes that keep their tensors and their recording."""

SHAPES_COUNTED = 1024
"""Most shapes whose uses are counted."""

logger = logging.getLogger(__name__)


class ForwardModel(Protocol):
    """What a forward pass needs of a decoder; see Decoder."""

    config: ModelConfig
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: str

    def forward(self, batch: TokenBatch, cache: KVTensors) -> Tensor:
        """Run one step: [N, H]."""


class PaddedSteps:
    """Runs the steps of plans: prompts, running sequences, or both.

    A step is padded whether it is recorded or not, so recording changes no bit of its results.
    What `shape_of` leaves out is computed as it comes.
    Ranks that are given the same steps record the same ones.
    """

    def __init__(self, model: ForwardModel, cache: KVTensors, slots: int) -> None:
        """slots: the most running sequences of a step."""
        self._model = model
        self._cache = cache
        self._uses: dict[StepShape, int] = {}  # the least recently used first
        self._held: dict[StepShape, tuple[PaddedBatch, Step]] = {}  # likewise
        self._fails = False
        # One for all shapes: what a graph returns would stay in the memory that graphs share.
        size = MOST_CHUNKS + padded(slots, 8), model.config.hidden_size
        self._hidden = torch.zeros(size, dtype=model.dtype, device=model.device)

    @property
    def recordings_held(self) -> int:
        """How many shapes have a recording."""
        return len(self._held)

    def forward(self, batch: TokenBatch, record: Recorder) -> Tensor:
        """Run a step that is in the host's memory: Decoder.forward.

        The hidden states stay as they are until the next step.
        """
        shape = shape_of(batch)
        if shape is None or batch.output_rows is None or shape.outputs > self._hidden.shape[0]:
            return self._model.forward(batch.to(self._model.device), self._cache)
        if shape in self._held:
            self._held[shape] = rows, step = self._held.pop(shape)
            rows.load(batch)
        else:
            rows = PaddedBatch(
                shape, self._model.config, self._model.cache_dtype, self._model.device
            )
            rows.load(batch)  # first, because a recording runs the step
            step = self._prepared(rows, record)
        step()
        return self._hidden[: batch.output_rows.shape[0]]

    def _prepared(self, rows: PaddedBatch, record: Recorder) -> Step:
        """Return what computes the rows; it is recorded where their shape was used before."""

        def step() -> None:
            self._compute(rows)

        uses = self._uses.pop(rows.shape, 0) + 1
        if self._fails or uses < RECORDED_AT:
            self._uses[rows.shape] = uses
            if len(self._uses) > SHAPES_COUNTED:
                del self._uses[next(iter(self._uses))]
            return step
        try:
            recorded = record(step)
        except NotRecordedError:
            logger.exception(
                "a step with prompts cannot be recorded; such steps are launched kernel by kernel",
                extra={"action": "step_not_recorded"},
            )
            self._fails = True
            return step
        self._held[rows.shape] = rows, recorded
        if len(self._held) > RECORDINGS_HELD:  # to record has waited for the device
            del self._held[next(iter(self._held))]
        return recorded

    def _compute(self, rows: PaddedBatch) -> None:
        """Compute the rows and keep what is wanted of them.  The host must not wait here."""
        found = self._model.forward(rows.rows, self._cache)
        self._hidden[: found.shape[0]].copy_(found)


def most_step_bytes(
    config: ModelConfig, dtype: torch.dtype, cache_dtype: torch.dtype, slots: int
) -> int:
    """Return an upper bound of the memory that the forward pass of a padded step takes.

    It is what one layer makes at the widest shape; the next layer takes the same memory.
    """
    rows, wide = MOST_PROMPT_ROWS + padded(slots, 8), torch.float32.itemsize
    query, key = config.n_heads * config.head_size, config.n_kv_heads * config.head_size
    stream = config.hidden_size * (4 * wide + 4 * dtype.itemsize)
    heads = (3 * query + 2 * key) * cache_dtype.itemsize
    inner = (3 if config.gated else 2) * config.intermediate_size * wide
    shape = MOST_DECODE_POSITIONS, slots, config.n_heads, config.head_size
    return rows * (stream + heads + inner) + kernels.decode_part_bytes(*shape)
