"""Records of the state of decode steps, which never leaves the device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class Column(IntEnum):
    """Columns of StepState.rows; cuda/step_update.cu says what each holds."""

    LENGTH = 0
    GENERATED = 1
    MAX_TOKENS = 2
    MIN_TOKENS = 3
    AUTOMATON = 4
    STATE = 5
    TEXT_BYTES = 6
    REASON = 7
    STOP_BEGIN = 8


class Reason(IntEnum):
    """Why a row ended.

    NO_ROOM: its history or its block table was full; the engine's reservations prevent that.
    """

    RUNNING = 0
    STOP_STRING = 1
    END_TOKEN = 2
    MAX_LENGTH = 3
    NOT_FINITE = 4
    NO_ROOM = 5


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """The bytes of every token's text, one after another: uint8[n]; starts: int32[V + 1]."""

    data: Tensor
    starts: Tensor


@dataclass(frozen=True, slots=True)
class StopTables:
    """The stop automata of a batch, one after another (see engine/stopping.py).

    trans: uint16[states, 256], next states counted from their automaton's first; longest:
    uint16[states].
    """

    trans: Tensor
    longest: Tensor


@dataclass(frozen=True, slots=True)
class StepState:
    """What the device knows of B rows from step to step.

    rows: int32[B, len(Column)]; history: int32[B, capacity], the tokens, prompts included;
    seen: int32[B, ceil(V / 32)] and counts: int32[B, V], see cuda/penalties.py; ends: int64[B, E],
    tokens that end the sequence, padded with -1; block_tables: int32[B, W].
    inputs: int64[4, B], for the next step: ids, positions, cache blocks (-1: no row), offsets in
    them; attention_lengths: int32[B]; finished: int32[1], counts the rows that ended.
    """

    rows: Tensor
    history: Tensor
    seen: Tensor
    counts: Tensor
    ends: Tensor
    block_tables: Tensor
    inputs: Tensor
    attention_lengths: Tensor
    finished: Tensor
