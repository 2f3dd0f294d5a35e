"""Windows: several decode steps that follow each other on the device without the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nightjar import kernels
from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.engine.device_state import (
    DeviceBatch,
    SeenTokens,
    Shape,
    slots_for,
    token_texts,
)
from nightjar.gpu_worker.engine.graphs import WARM_UPS, CudaGraphs, Recorder, Step, eager
from nightjar.gpu_worker.engine.logits_processors import LogitsProcessors
from nightjar.gpu_worker.engine.plan import StepPlan
from nightjar.gpu_worker.engine.sequence import Choice, GenerateSequence
from nightjar.gpu_worker.engine.upkeep import CacheUpkeep
from nightjar.gpu_worker.models import Decoder, KVTensors, TokenBatch
from nightjar.kernels import Column, PagedTensors

IDLE_SHARE = 8
"""While requests wait, at most one step of a slot in so many may compute nothing."""

Moved = list[tuple[GenerateSequence, Choice | None]]
"""The token of each sequence in one step; None where its scores were not finite."""


@dataclass(frozen=True, slots=True)
class Window:
    """The steps of a launched window.

    tokens: int64[steps, slots]; rows: int32[slots, columns], StepState.rows after the steps.  Both
    are in the host's memory, complete after the event `landed` (None: already).
    """

    steps: int
    tokens: Tensor
    rows: Tensor
    landed: torch.cuda.Event | None


class DecodeWindows:
    """Runs sequences on the device, in windows of steps.

    Within a window the device knows all that a step needs, and finds out itself which sequences
    end. While one window computes, the host takes in the one before it, so that a sequence that
    ends by a stop is found out one window late; its slot computes nothing until then.

    record: makes a step cheaper to launch; it is used once for each shape.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVTensors,
        upkeep: CacheUpkeep,
        token_bytes: Sequence[bytes],
        config: EngineConfig,
    ) -> None:
        self._model = model
        self._cache = cache
        self._upkeep = upkeep
        self._config = config
        self._block_size = config.block_size
        recorded = config.cuda_graphs and cache.keys.is_cuda
        self.record: Recorder = CudaGraphs() if recorded else eager
        banned = sorted(set(config.banned_token_ids))
        self._banned = torch.tensor(banned, dtype=torch.int64, device=model.device)
        self._texts = token_texts(token_bytes, model.device)
        self._seen: SeenTokens | None = None
        self._steps: dict[Shape, tuple[DeviceBatch, Step]] = {}
        self._sequences: list[GenerateSequence] = []
        self._shape: Shape | None = None
        self._flying: deque[Window] = deque()

    @property
    def in_flight(self) -> bool:
        """Whether a launched window has not been read yet."""
        return bool(self._flying)

    @property
    def steps_under_way(self) -> list[int]:
        """The steps of each window that was launched and not taken in, the oldest first."""
        return [window.steps for window in self._flying]

    @property
    def batch(self) -> DeviceBatch | None:
        """The device's tensors of the last window; None before the first one."""
        return None if self._shape is None else self._step_of(self._shape)[0]

    @property
    def slots(self) -> int:
        """Rows of each step of the last window."""
        return 0 if self._shape is None else self._shape.slots

    @property
    def shapes_held(self) -> int:
        """How many shapes of a step have tensors and, where steps are captured, a graph."""
        return len(self._steps)

    def serves(self, plan: StepPlan) -> bool:
        """Whether a plan can be the first step of a window.

        It must hold only running sequences, and the device must be able to continue each of them.
        """
        alone = plan.decodes and not plan.prompts and not plan.ranks
        return self._config.window_steps > 1 and bool(alone) and all(map(_serves, plan.decodes))

    @torch.inference_mode()
    def start(self, sequences: Sequence[GenerateSequence], *, crowded: bool) -> None:
        """Copy running sequences to the device, and launch their first window.

        crowded: requests wait for a slot, so that no slot should stay free for long.
        """
        shape = Shape.of(sequences, self._block_size)
        batch, _ = self._step_of(shape)
        self._sequences, self._shape = list(sequences), shape
        self._grow(steps := self._length(crowded))
        batch.load(self._sequences, self._block_size)
        self.launch(steps)

    @torch.inference_mode()
    def follow(self, *, crowded: bool) -> bool:
        """Launch the next window after the running one, if that is useful; return whether it was.

        No request may have come or been cancelled since the first window.
        """
        running = [sequence for sequence in self._sequences if sequence.table is not None]
        if self._shape is None or not running:
            return False
        if crowded and len(running) < len(self._sequences):
            return False  # a slot is free
        if slots_for(len(running)) < self._shape.slots:
            return False  # fewer slots would do
        steps = self._length(crowded)
        if steps < 1:
            return False
        self._grow(steps)
        batch, _ = self._step_of(self._shape)
        batch.load_tables(self._sequences)
        self.launch(steps)
        return True

    def land(self) -> Iterator[Moved]:
        """Wait for the oldest window; yield the tokens of each of its steps.

        The caller adds the tokens between steps; an ended sequence is not given again.

        Raises:
            RuntimeError: The device and the host disagree where a sequence ends.
        """
        window = self._flying.popleft()
        if window.landed is not None:
            window.landed.synchronize()
        for tokens in window.tokens.tolist():
            yield [
                (sequence, None if token < 0 else Choice(token))
                for sequence, token in zip(self._sequences, tokens, strict=False)
                if sequence.table is not None
            ]
        written = window.rows[:, Column.GENERATED].tolist()
        for sequence, count in zip(self._sequences, written, strict=False):
            if sequence.table is not None and len(sequence.generated) != count:
                raise RuntimeError(
                    f"request {sequence.request_id}: the device ended it after {count} tokens, the "
                    f"host has {len(sequence.generated)}"
                )

    def _length(self, crowded: bool) -> int:
        """Steps of the next window; 0 where every sequence ends by its length before it."""
        under_way = sum(self.steps_under_way)
        left = [
            max(0, sequence.sampling.max_tokens - len(sequence.generated) - under_way)
            for sequence in self._sequences
            if sequence.table is not None
        ]
        return window_length(left, self._config.window_steps, crowded=crowded)

    def _grow(self, steps: int) -> None:
        """Hold the blocks that the next steps write, and the next one's after them."""
        ahead = steps + sum(self.steps_under_way)
        for sequence in self._sequences:
            if sequence.table is not None:
                sequence.table.grow(min(sequence.length + ahead, sequence.job.max_length))
        self._upkeep.prepare()

    def launch(self, steps: int) -> None:
        """Queue the steps of a window on the device, and the copy of what they choose."""
        if self._shape is None:
            raise RuntimeError("a window without sequences")
        batch, step = self._step_of(self._shape)
        batch.step.zero_()
        for _ in range(steps):
            step()
        self._upkeep.beside_compute()
        found = batch.tokens[:steps], batch.state.rows
        tokens, rows = (_read_back(x) for x in found)
        landed = None
        if batch.tokens.is_cuda:
            landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            landed.record()
        self._flying.append(Window(steps, tokens, rows, landed))

    def _step_of(self, shape: Shape) -> tuple[DeviceBatch, Step]:
        """Return the tensors of a shape and its step, which is recorded when first needed."""
        if shape not in self._steps:
            vocab_size, device = self._model.config.vocab_size, self._model.device
            slots = shape.slots
            if self._seen is None or self._seen.counts.shape[0] < slots:
                self._seen = SeenTokens.allocate(slots, vocab_size, device)
            steps = max(self._config.window_steps, WARM_UPS + 1)
            batch = DeviceBatch.allocate(shape, self._seen, steps, self._block_size)
            self._steps[shape] = batch, self.record(lambda: self._step(batch))
        return self._steps[shape]

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
        kernels.step_update(tokens, state, self._texts, batch.stops, self._block_size)


def window_length(left: Sequence[int], most: int, *, crowded: bool) -> int:
    """Return the steps of a window, up to `most`; 0 where no sequence has a step left.

    left: the most steps that each sequence still has.  crowded: requests wait for slots.  A slot
    without a sequence costs its share of a step.  A step that the host launches kernel by kernel,
    to add one request, costs several steps.  So a window ends when one step of a slot in
    IDLE_SHARE would compute nothing.
    """
    steps = min(most, max(left))
    while crowded and IDLE_SHARE * sum(max(0, steps - own) for own in left) > steps * len(left):
        steps -= 1
    return steps


def _serves(sequence: GenerateSequence) -> bool:
    """Whether the device can continue a sequence by itself.

    The host is needed for log-probabilities, beams, adapters and what `LogitsProcessors.need_host`
    names. It is also needed until `min_tokens` are generated, because end tokens are blocked.
    """
    params = sequence.sampling
    return (
        params.logprobs is None
        and params.beams is None
        and not LogitsProcessors.need_host(params)
        and len(sequence.generated) >= params.min_tokens
        and sequence.job.request.adapter is None
    )


def _read_back(found: Tensor) -> Tensor:
    """Return a copy in the host's memory; on a GPU it is complete when the stream reaches it."""
    if not found.is_cuda:
        return found.clone()
    copy = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    return copy.copy_(found, non_blocking=True)
