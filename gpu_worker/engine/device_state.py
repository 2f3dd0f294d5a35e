"""The host's state of the running sequences, as it is brought to the device.

The host's state of a sequence (tokens, stop matcher) decides.  The device's state is made from it
and follows the same rules until the host changes something.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nightjar.gpu_worker.engine.sampling import draw_parameters
from nightjar.gpu_worker.engine.sequence import GenerateSequence
from nightjar.gpu_worker.engine.stopping import StopAutomaton, automaton
from nightjar.gpu_worker.models.decode_state import BatchArrays, BatchState, Seen, Shape
from nightjar.kernels import Column, Reason


def shape_of(sequences: Sequence[GenerateSequence], block_size: int) -> Shape:
    """Return the smallest shape that holds these sequences up to their ends.

    Each size is rounded up, so that few graphs serve all batches.
    """
    width = max(-(-sequence.job.max_length // block_size) for sequence in sequences)
    ends = max(len(sequence.ends) for sequence in sequences)
    states = 1 + sum(len(one.trans) for one in _automata(sequences).values())
    return Shape(
        slots_for(len(sequences)),
        _bucket(width, 4),
        _bucket(ends, 4),
        _bucket(states, 64),
    )


def state_of(
    sequences: Sequence[GenerateSequence], shape: Shape, block_size: int, vocab_size: int
) -> BatchState:
    """Return the state of sequences, each in the slot of its number; other slots are free."""
    arrays = BatchArrays.free(shape)
    begins = _fill_stop_tables(arrays, _automata(sequences))
    _fill_columns(arrays.rows, sequences, begins)
    for slot, sequence in enumerate(sequences):
        arrays.ends[slot, : len(sequence.ends)] = list(sequence.ends)
    _fill_inputs(arrays, sequences, block_size)
    count = len(sequences)
    draws = draw_parameters(sequences, vocab_size)
    names = "seeds", "samples", "temperature", "top_k", "top_p", "min_p"
    for name, values in zip(names, draws.tensors(), strict=True):
        getattr(arrays, name)[:count] = values.numpy()
    return BatchState(shape, arrays, _fill_penalties(arrays, sequences, vocab_size))


def tables_of(sequences: Sequence[GenerateSequence], shape: Shape) -> np.ndarray:
    """Return the block tables of the running sequences: int32[slots, width]."""
    tables = np.zeros((shape.slots, shape.width), dtype=np.int32)
    for slot, sequence in enumerate(sequences):
        if sequence.table is not None:
            blocks = sequence.table.blocks
            tables[slot, : len(blocks)] = blocks
    return tables


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


def _automata(sequences: Sequence[GenerateSequence]) -> dict[tuple[bytes, ...], StopAutomaton]:
    """One automaton for each set of stops; most sequences of a job share their set."""
    sets = dict.fromkeys(sequence.sampling.stop for sequence in sequences)
    return {stops: automaton(stops) for stops in sets if stops}


def _fill_stop_tables(
    arrays: BatchArrays, automata: dict[tuple[bytes, ...], StopAutomaton]
) -> dict[tuple[bytes, ...], int]:
    """Fill in all automata, one after another; return where each begins."""
    begins, slot = {}, 0
    for stops, one in automata.items():
        end = slot + len(one.trans)
        arrays.trans[slot:end] = one.trans
        arrays.longest[slot:end] = one.longest
        begins[stops], slot = slot, end
    return begins


def _fill_columns(
    rows: np.ndarray,
    sequences: Sequence[GenerateSequence],
    begins: dict[tuple[bytes, ...], int],
) -> None:
    """Fill in StepState.rows: int32[slots, len(Column)]."""
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


def _fill_inputs(
    arrays: BatchArrays, sequences: Sequence[GenerateSequence], block_size: int
) -> None:
    """Fill in the newest tokens and their attention lengths."""
    inputs, lengths, count = arrays.inputs, arrays.lengths, len(sequences)
    lengths[:count] = [sequence.length for sequence in sequences]
    positions = lengths[:count] - 1
    inputs[0, :count] = [sequence.generated[-1] for sequence in sequences]
    inputs[1, :count] = positions
    inputs[2, :count] = [
        sequence.held.blocks[slot]
        for sequence, slot in zip(sequences, (positions // block_size).tolist(), strict=True)
    ]
    inputs[3, :count] = positions % block_size


def _fill_penalties(
    arrays: BatchArrays, sequences: Sequence[GenerateSequence], vocab_size: int
) -> list[Seen]:
    """Fill in the penalties; return the tokens of the sequences that have some."""
    seen = []
    for slot, sequence in enumerate(sequences):
        processors = sequence.processors
        if processors is not None and processors.counts is not None:
            penalties = arrays.repetition, arrays.presence, arrays.frequency
            for array, value in zip(penalties, processors.penalties, strict=True):
                array[slot] = value
            seen.append(_seen(slot, sequence, vocab_size))
    return seen


def _seen(slot: int, sequence: GenerateSequence, vocab_size: int) -> Seen:
    """Return the tokens of a sequence that penalties count; prompt vectors are no tokens."""
    prompt = np.asarray(sequence.job.prefix.tokens, dtype=np.int64)
    generated = np.asarray(sequence.generated, dtype=np.int64)
    return Seen(slot, prompt[prompt < vocab_size], generated)
