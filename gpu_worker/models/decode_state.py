"""The state of running sequences on the device, and what the host brings there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nightjar import kernels
from nightjar.kernels import Column, Reason, StepState, StopTables, TokenTexts

WORD_BITS = 32


class Shape(NamedTuple):
    """The sizes of a batch's tensors.

    slots: sequences; width: blocks of a table; ends: tokens that end a sequence; states: states of
    all stop automata together.
    """

    slots: int
    width: int
    ends: int
    states: int


class Seen(NamedTuple):
    """The tokens of one sequence that penalties count: int64[n] each, below the vocabulary."""

    slot: int
    prompt: np.ndarray
    generated: np.ndarray


class BatchArrays(NamedTuple):
    """The host's state of the slots of a batch.

    trans, longest: see StopTables; rows, ends, inputs, lengths: see StepState; seeds to min_p: see
    DrawParameters; repetition, presence, frequency: see Penalties.
    """

    trans: np.ndarray
    longest: np.ndarray
    rows: np.ndarray
    ends: np.ndarray
    inputs: np.ndarray
    lengths: np.ndarray
    seeds: np.ndarray
    samples: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    repetition: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray

    @staticmethod
    def free(shape: Shape) -> BatchArrays:
        """Return the arrays of free slots: a step computes nothing and changes nothing."""
        slots, states = shape.slots, shape.states
        rows = np.zeros((slots, len(Column)), dtype=np.int32)
        rows[:, Column.REASON] = Reason.MAX_LENGTH
        rows[:, [Column.AUTOMATON, Column.STOP_BEGIN]] = -1
        inputs = np.zeros((4, slots), dtype=np.int64)
        inputs[2] = -1
        whole, real = ([np.zeros(slots, dtype=x) for _ in range(5)] for x in (np.int64, np.float32))
        return BatchArrays(
            trans=np.zeros((states, 256), dtype=np.uint16),
            longest=np.zeros(states, dtype=np.uint16),
            rows=rows,
            ends=np.full((slots, shape.ends), -1, dtype=np.int64),
            inputs=inputs,
            lengths=np.zeros(slots, dtype=np.int32),
            seeds=whole[0],
            samples=whole[1],
            temperature=real[0],
            top_k=whole[2],
            top_p=real[1],
            min_p=real[2],
            repetition=np.ones(slots, dtype=np.float32),
            presence=real[3],
            frequency=real[4],
        )


class BatchState(NamedTuple):
    """The host's state of the sequences of a batch, each in the slot of its number.

    seen: of the sequences with penalties.
    """

    shape: Shape
    arrays: BatchArrays
    seen: Sequence[Seen] = ()


@dataclass(frozen=True, slots=True)
class WindowInput:
    """What the host gives a window of decode steps.

    tables: int32[slots, width], the block tables.
    batch: the state of new sequences; None where the window continues the one before it.
    """

    steps: int
    tables: np.ndarray
    batch: BatchState | None = None


@dataclass(frozen=True, slots=True)
class DrawParameters:
    """Sampling parameters of B rows (see kernels.uniform and kernels.sample).

    seeds, samples: int64[B]; temperature: float32[B]; top_k: int64[B]; top_p, min_p: float32[B].
    """

    seeds: Tensor
    samples: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors, in the order of the fields."""
        return (
            self.seeds,
            self.samples,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
        )

    def to(self, device: torch.device) -> DrawParameters:
        """Return the same on a device."""
        return DrawParameters(*(kernels.upload(tensor, device) for tensor in self.tensors()))

    def draw(self, logits: Tensor, steps: Tensor) -> Tensor:
        """Draw one token a row: float32[B, V]; steps: int64[B], tokens drawn before -> int64[B]."""
        draws = kernels.uniform(self.seeds, self.samples, steps)
        return kernels.sample(logits, self.temperature, self.top_k, self.top_p, self.min_p, draws)


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of each slot: float32[slots] each; 1, 0, 0 are off (see kernels.penalize)."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Which tokens each slot has seen, and how often it generated them: see kernels.penalize.

    The batches of all shapes share it, because one of them runs at a time.  A graph keeps its
    address.
    """

    seen: Tensor
    counts: Tensor

    @staticmethod
    def allocate(slots: int, vocab_size: int, device: str) -> SeenTokens:
        """Return zeros: seen int32[slots, words], counts int32[slots, V]."""
        words = -(-vocab_size // WORD_BITS)
        zeros = (
            torch.zeros(slots, size, dtype=torch.int32, device=device)
            for size in (words, vocab_size)
        )
        return SeenTokens(*zeros)


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The tensors of the sequences of one shape, at fixed addresses.

    tokens: int64[steps, slots], the tokens of a window's steps (-1: scores not finite);
    step: int64[1], the row that the next step writes.
    """

    shape: Shape
    state: StepState
    stops: StopTables
    draws: DrawParameters
    penalties: Penalties
    tokens: Tensor
    step: Tensor

    @staticmethod
    def allocate(shape: Shape, seen: SeenTokens, steps: int, block_size: int) -> DeviceBatch:
        """Make a batch in which every slot is free."""
        device, slots = seen.counts.device, shape.slots

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        def floats() -> Tensor:
            return zeros(slots, dtype=torch.float32)

        state = StepState(
            rows=zeros(slots, len(Column), dtype=torch.int32),
            history=zeros(slots, shape.width * block_size, dtype=torch.int32),
            seen=seen.seen[:slots],
            counts=seen.counts[:slots],
            ends=zeros(slots, shape.ends),
            block_tables=zeros(slots, shape.width, dtype=torch.int32),
            inputs=zeros(4, slots),
            attention_lengths=zeros(slots, dtype=torch.int32),
            finished=zeros(1, dtype=torch.int32),
        )
        batch = DeviceBatch(
            shape,
            state,
            StopTables(
                torch.empty(shape.states, 256, dtype=torch.uint16, device=device),
                torch.empty(shape.states, dtype=torch.uint16, device=device),
            ),
            DrawParameters(zeros(slots), zeros(slots), floats(), zeros(slots), floats(), floats()),
            Penalties(floats(), floats(), floats()),
            zeros(steps, slots),
            zeros(1),
        )
        batch.load(BatchState(shape, BatchArrays.free(shape)))
        return batch

    def load(self, batch: BatchState) -> None:
        """Copy sequences to the device, without their block tables."""
        state, penalties = self.state, self.penalties
        targets = (
            *(self.stops.trans, self.stops.longest),
            *(state.rows, state.ends, state.inputs, state.attention_lengths),
            *self.draws.tensors(),
            *(penalties.repetition, penalties.presence, penalties.frequency),
        )
        for target, values in zip(targets, batch.arrays, strict=True):
            kernels.put(target, values)
        self.state.finished.zero_()
        for one in batch.seen:
            self._load_seen(one)

    def load_tables(self, tables: np.ndarray) -> None:
        """Copy the block tables to the device: int32[slots, width]."""
        kernels.put(self.state.block_tables, tables)

    def _load_seen(self, one: Seen) -> None:
        """Copy the tokens of a sequence that penalties count."""
        words, vocab_size = self.state.seen.shape[1], self.state.counts.shape[1]
        bits = np.zeros(words * WORD_BITS, dtype=np.uint8)
        bits[one.prompt] = 1
        bits[one.generated] = 1
        packed = np.packbits(bits, bitorder="little").view(np.int32)
        counts = np.bincount(one.generated, minlength=vocab_size).astype(np.int32)
        kernels.put(self.state.seen[one.slot], packed)
        kernels.put(self.state.counts[one.slot], counts)


def token_texts(token_bytes: Sequence[bytes], device: str) -> TokenTexts:
    """The raw bytes of every token on the device."""
    data = np.frombuffer(b"".join(token_bytes) or b"\0", dtype=np.uint8).copy()
    starts = np.cumsum([0, *map(len, token_bytes)]).astype(np.int32)
    return TokenTexts(torch.from_numpy(data).to(device), torch.from_numpy(starts).to(device))
