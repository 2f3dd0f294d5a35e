"""The state of the running sequences on the device, and how it is brought there.

The host's state of a sequence (tokens, stop matcher) decides.  The device's state is made from it
and follows the same rules until the host changes something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nightjar.gpu_worker.engine.sampling import DrawParameters
from nightjar.gpu_worker.engine.sequence import GenerateSequence
from nightjar.gpu_worker.engine.stopping import StopAutomaton, automaton
from nightjar.kernels import Column, Reason, StepState, StopTables, TokenTexts

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a batch's tensors, each rounded up, so that few graphs serve all batches.

    slots: sequences; width: blocks of a table; ends: tokens that end a sequence; states: states of
    all stop automata together.
    """

    slots: int
    width: int
    ends: int
    states: int

    @staticmethod
    def of(sequences: Sequence[GenerateSequence], block_size: int) -> Shape:
        """Return the smallest shape that holds these sequences up to their ends."""
        width = max(-(-sequence.job.max_length // block_size) for sequence in sequences)
        ends = max(len(sequence.ends) for sequence in sequences)
        states = 1 + sum(len(one.trans) for one in _automata(sequences).values())
        return Shape(
            slots_for(len(sequences)),
            _bucket(width, 4),
            _bucket(ends, 4),
            _bucket(states, 64),
        )


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
        """Make a batch in which every slot is free: a step computes nothing and changes nothing."""
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
        batch.load((), block_size)
        return batch

    def load(self, sequences: Sequence[GenerateSequence], block_size: int) -> None:
        """Copy sequences to the device, each to the slot of its number; other slots are free."""
        found = _automata(sequences)
        begins, trans, longest = _stop_tables(found, self.shape.states)
        _put(self.stops.trans, trans)
        _put(self.stops.longest, longest)
        _put(self.state.rows, _columns(sequences, begins, self.shape.slots))
        _put(self.state.ends, _ends(sequences, self.shape))
        self.load_tables(sequences)
        inputs, lengths = _inputs(sequences, self.shape.slots, block_size)
        _put(self.state.inputs, inputs)
        _put(self.state.attention_lengths, lengths)
        self.state.finished.zero_()
        self._load_sampling(sequences)

    def load_tables(self, sequences: Sequence[GenerateSequence]) -> None:
        """Copy the block tables of the running sequences to the device."""
        tables = np.zeros((self.shape.slots, self.shape.width), dtype=np.int32)
        for slot, sequence in enumerate(sequences):
            if sequence.table is not None:
                blocks = sequence.table.blocks
                tables[slot, : len(blocks)] = blocks
        _put(self.state.block_tables, tables)

    def _load_sampling(self, sequences: Sequence[GenerateSequence]) -> None:
        """How tokens are chosen."""
        count, vocab_size = len(sequences), self.state.counts.shape[1]
        draws = DrawParameters.of(sequences, vocab_size)
        for target, source in zip(self.draws.tensors(), draws.tensors(), strict=True):
            _put(target[:count], source.numpy())
        off = np.tile(np.array([[1], [0], [0]], dtype=np.float32), (1, self.shape.slots))
        for slot, sequence in enumerate(sequences):
            if sequence.processors is not None and sequence.processors.counts is not None:
                off[:, slot] = sequence.processors.penalties
                self._load_seen(slot, sequence)
        names = (self.penalties.repetition, self.penalties.presence, self.penalties.frequency)
        for target, values in zip(names, off, strict=True):
            _put(target, values)

    def _load_seen(self, slot: int, sequence: GenerateSequence) -> None:
        """Return the tokens of a sequence that penalties count; prompt vectors are no tokens."""
        words, vocab_size = self.state.seen.shape[1], self.state.counts.shape[1]
        prompt = np.asarray(sequence.job.prefix.tokens, dtype=np.int64)
        generated = np.asarray(sequence.generated, dtype=np.int64)
        bits = np.zeros(words * WORD_BITS, dtype=np.uint8)
        bits[prompt[prompt < vocab_size]] = 1
        bits[generated] = 1
        packed = np.packbits(bits, bitorder="little").view(np.int32)
        counts = np.bincount(generated, minlength=vocab_size).astype(np.int32)
        _put(self.state.seen[slot], packed)
        _put(self.state.counts[slot], counts)


def token_texts(token_bytes: Sequence[bytes], device: str) -> TokenTexts:
    """The raw bytes of every token on the device."""
    data = np.frombuffer(b"".join(token_bytes) or b"\0", dtype=np.uint8).copy()
    starts = np.cumsum([0, *map(len, token_bytes)]).astype(np.int32)
    return TokenTexts(torch.from_numpy(data).to(device), torch.from_numpy(starts).to(device))


def slots_for(sequences: int) -> int:
    """Return the slots of the smallest batch that holds so many sequences.

    Slots come in eights up to 64 and in sixteens beyond.  A product of up to 8 rows takes as long
    as one of 8 rows.
    """
    step = 8 if sequences <= 64 else 16
    return step * max(1, -(-sequences // step))


def _bucket(count: int, least: int) -> int:
    """Return the next power of two, at least `least`."""
    return max(least, 1 << (count - 1).bit_length() if count > 1 else 1)


def _put(target: Tensor, values: np.ndarray) -> None:
    """Copy to the device without waiting."""
    source = torch.from_numpy(np.ascontiguousarray(values))
    if target.is_cuda:
        # torch keeps pinned memory until the copy has read it
        target.copy_(source.pin_memory(), non_blocking=True)
    else:
        target.copy_(source)


def _automata(sequences: Sequence[GenerateSequence]) -> dict[tuple[bytes, ...], StopAutomaton]:
    """One automaton for each set of stops; most sequences of a job share their set."""
    sets = dict.fromkeys(sequence.sampling.stop for sequence in sequences)
    return {stops: automaton(stops) for stops in sets if stops}


def _stop_tables(
    automata: dict[tuple[bytes, ...], StopAutomaton], states: int
) -> tuple[dict[tuple[bytes, ...], int], np.ndarray, np.ndarray]:
    """Return where each automaton begins, and all of them: uint16[states, 256], uint16[states]."""
    trans = np.zeros((states, 256), dtype=np.uint16)
    longest = np.zeros(states, dtype=np.uint16)
    begins, slot = {}, 0
    for stops, one in automata.items():
        end = slot + len(one.trans)
        trans[slot:end] = one.trans
        longest[slot:end] = one.longest
        begins[stops], slot = slot, end
    return begins, trans, longest


def _columns(
    sequences: Sequence[GenerateSequence], begins: dict[tuple[bytes, ...], int], slots: int
) -> np.ndarray:
    """StepState.rows: int32[slots, len(Column)]; free slots have ended."""
    rows = np.zeros((slots, len(Column)), dtype=np.int32)
    rows[:, Column.REASON] = Reason.MAX_LENGTH
    rows[:, [Column.AUTOMATON, Column.STOP_BEGIN]] = -1
    used = rows[: len(sequences)]
    used[:, Column.REASON] = Reason.RUNNING
    params = [sequence.sampling for sequence in sequences]
    # A column at a time: numpy takes as long for one number as for a list of them.
    for column, values in (
        (Column.LENGTH, [sequence.length for sequence in sequences]),
        (Column.GENERATED, [len(sequence.generated) for sequence in sequences]),
        (Column.MAX_TOKENS, [one.max_tokens for one in params]),
        (Column.MIN_TOKENS, [one.min_tokens for one in params]),
        (Column.AUTOMATON, [begins.get(one.stop, -1) for one in params]),
        (Column.STATE, [sequence.matcher.state for sequence in sequences]),
        (Column.TEXT_BYTES, [sequence.matcher.length for sequence in sequences]),
    ):
        used[:, column] = values
    return rows


def _ends(sequences: Sequence[GenerateSequence], shape: Shape) -> np.ndarray:
    """StepState.ends: int64[slots, ends]."""
    ends = np.full((shape.slots, shape.ends), -1, dtype=np.int64)
    for slot, sequence in enumerate(sequences):
        ends[slot, : len(sequence.ends)] = list(sequence.ends)
    return ends


def _inputs(
    sequences: Sequence[GenerateSequence], slots: int, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """StepState.inputs int64[4, slots] and attention_lengths int32[slots]: the newest tokens."""
    inputs = np.zeros((4, slots), dtype=np.int64)
    inputs[2] = -1
    lengths = np.zeros(slots, dtype=np.int32)
    count = len(sequences)
    lengths[:count] = [sequence.length for sequence in sequences]
    positions = lengths[:count] - 1
    inputs[0, :count] = [sequence.generated[-1] for sequence in sequences]
    inputs[1, :count] = positions
    inputs[2, :count] = [
        sequence.held.blocks[slot]
        for sequence, slot in zip(sequences, (positions // block_size).tolist(), strict=True)
    ]
    inputs[3, :count] = positions % block_size
    return inputs, lengths
