"""Windows: several decode steps that follow each other on the device without the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.engine.device_state import shape_of, slots_for, state_of, tables_of
from nightjar.gpu_worker.engine.plan import StepPlan
from nightjar.gpu_worker.engine.sequence import Choice, GenerateSequence
from nightjar.gpu_worker.engine.upkeep import CacheUpkeep
from nightjar.gpu_worker.engine.window_policy import (
    FEWEST_STEPS,
    Division,
    divide,
    most_steps,
    needs_host,
    window_length,
)
from nightjar.gpu_worker.models import Decoder, KVTensors
from nightjar.gpu_worker.models.decode_state import Shape, WindowInput
from nightjar.gpu_worker.models.decode_steps import StepSettings
from nightjar.kernels import Column

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

    steps: runs them; if other ranks compute the model too, on all of them.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVTensors,
        upkeep: CacheUpkeep,
        token_bytes: Sequence[bytes],
        config: EngineConfig,
    ) -> None:
        self._upkeep = upkeep
        self._config = config
        self._vocab_size = model.config.vocab_size
        settings = StepSettings(
            token_bytes=token_bytes,
            banned_token_ids=config.banned_token_ids,
            slots=slots_for(config.slots + config.urgent_slots),
            block_size=config.block_size,
            window_steps=config.window_steps,
            cuda_graphs=config.cuda_graphs,
        )
        self.steps = model.decode_steps(cache, settings)
        self._sequences: list[GenerateSequence] = []
        self._shape: Shape | None = None
        self._filled = 0  # sequences of the batch, those beside the window included
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
    def slots(self) -> int:
        """Rows of each step of the last window."""
        return 0 if self._shape is None else self._shape.slots

    def divide(self, plan: StepPlan) -> Division | None:
        """Return the sequences of the next window and those beside it; see `window_policy`."""
        return divide(plan, self._config.window_steps)

    def left_out(self, running: Sequence[GenerateSequence]) -> list[GenerateSequence]:
        """Return the running sequences that the last window does not compute."""
        mine = set(self._sequences)
        return [sequence for sequence in running if sequence not in mine]

    @torch.inference_mode()
    def start(
        self,
        sequences: Sequence[GenerateSequence],
        *,
        crowded: bool,
        single: Sequence[GenerateSequence] = (),
    ) -> int:
        """Copy running sequences to the device, and launch their first window; return its steps.

        crowded: requests wait for a slot, so that no slot should stay free for long.
        single: the sequences that get one token beside each window.
        """
        block_size = self._config.block_size
        shape = shape_of(sequences, block_size)
        self._sequences, self._shape = list(sequences), shape
        self._filled = len(sequences) + len(single)
        most = most_steps(len(sequences), single, self._config.window_steps)
        self._grow(steps := self._length(most, crowded))
        batch = state_of(sequences, shape, block_size, self._vocab_size)
        self.launch(WindowInput(steps, tables_of(sequences, shape), batch))
        return steps

    @torch.inference_mode()
    def follow(self, *, crowded: bool, single: Sequence[GenerateSequence] = ()) -> int:
        """Launch the next window after the running one; return its steps, 0 where it is no use.

        No request may have come or been cancelled since the first window.
        """
        running = [sequence for sequence in self._sequences if sequence.table is not None]
        filled = len(running) + len(single)
        has_room = crowded and filled < self._filled
        if self._shape is None or has_room or _pauses(running, single, self._shape):
            return 0
        self._filled = max(filled, self._filled)  # a beam search begins with one sequence
        most = most_steps(len(running), single, self._config.window_steps)
        steps = self._length(most, crowded) if most >= FEWEST_STEPS else 0
        if steps:
            self._grow(steps)
            self.launch(WindowInput(steps, tables_of(self._sequences, self._shape)))
        return steps

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

    def _length(self, most: int, crowded: bool) -> int:
        """Steps of the next window; 0 where every sequence ends by its length before it."""
        under_way = sum(self.steps_under_way)
        left = [
            max(0, sequence.sampling.max_tokens - len(sequence.generated) - under_way)
            for sequence in self._sequences
            if sequence.table is not None
        ]
        return window_length(left, most, crowded=crowded)

    def _grow(self, steps: int) -> None:
        """Hold the blocks that the next steps write, and the next one's after them."""
        ahead = steps + sum(self.steps_under_way)
        for sequence in self._sequences:
            if sequence.table is not None:
                sequence.table.grow(min(sequence.length + ahead, sequence.job.max_length))
        self._upkeep.prepare()

    def launch(self, window: WindowInput) -> None:
        """Queue the steps of a window on the device, and the copy of what they choose."""
        self.steps.run(window)
        self._upkeep.beside_compute()
        batch = self.steps.batch
        found = batch.tokens[: window.steps], batch.state.rows
        tokens, rows = (_read_back(x) for x in found)
        landed = None
        if batch.tokens.is_cuda:
            landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            landed.record()
        self._flying.append(Window(window.steps, tokens, rows, landed))


def _pauses(
    running: Sequence[GenerateSequence], single: Sequence[GenerateSequence], shape: Shape
) -> bool:
    """Whether another window would serve the sequences better than one more of this shape."""
    half_would_do = 2 * slots_for(len(running)) <= shape.slots
    some_can_join = not all(map(needs_host, single))
    return not running or half_would_do or some_can_join


def _read_back(found: Tensor) -> Tensor:
    """Return a copy in the host's memory; on a GPU it is complete when the stream reaches it."""
    if not found.is_cuda:
        return found.clone()
    copy = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    return copy.copy_(found, non_blocking=True)
