"""The device's end of a step against the engine's own: GenerateSequence's rules, one row at a
time."""

from array import array
from dataclasses import fields
from random import Random

import pytest
import torch

from nightjar.gpu_worker.engine.stopping import StopAutomaton, StopMatcher
from nightjar.kernels import Column, Reason, StepState, StopTables, TokenTexts, cuda
from tests.kernels_cuda.penalised import bitmap, counted

BLOCK_SIZE = 4

TEXTS = [b"", b"a", b"b", b"ab", b"ba", b"abc", b"c", "가".encode()[:1], "가".encode()[1:], b"END"]
"""What the tokens of the test's vocabulary stand for; one of none, and a syllable in two."""

END_TOKEN = 9


class Row:
    """A text as the engine follows it."""

    def __init__(self, prompt, stops=(), max_tokens=50, min_tokens=0):
        self.prompt, self.generated = list(prompt), []
        self.stops, self.max_tokens, self.min_tokens = tuple(stops), max_tokens, min_tokens
        self.matcher = StopMatcher(self.stops, min_tokens)
        self.reason, self.stop_begin, self.text_bytes = Reason.RUNNING, -1, 0

    def add(self, token):
        """As engine/sequence.py has it."""
        if self.reason:
            return
        if token < 0:
            self.reason = Reason.NOT_FINITE
            return
        self.generated.append(token)
        if token == END_TOKEN:
            self.reason = Reason.END_TOKEN
            return
        self.text_bytes += len(TEXTS[token])
        begin = self.matcher.feed(TEXTS[token])
        if begin is not None:
            self.reason, self.stop_begin = Reason.STOP_STRING, begin
        elif len(self.generated) == self.max_tokens:
            self.reason = Reason.MAX_LENGTH


def stop_tables(rows):
    """The automata of all rows one after another, and where each row's begins."""
    trans, longest, begins = [array("H", [0]) * 256], [0], []
    for row in rows:
        begins.append(len(trans) if row.stops else -1)
        if row.stops:
            automaton = StopAutomaton(row.stops)
            trans += automaton.trans
            longest += automaton.longest
    tables = StopTables(
        torch.tensor([list(line) for line in trans], dtype=torch.uint16),
        torch.tensor(longest, dtype=torch.uint16),
    )
    return tables, begins


def start(rows, begins, capacity=64, width=16):
    """The device's state before the first step."""
    batch, vocab_size = len(rows), len(TEXTS)
    state = torch.zeros(batch, len(Column), dtype=torch.int32)
    history = torch.full((batch, capacity), -7, dtype=torch.int32)
    for i, (row, begin) in enumerate(zip(rows, begins, strict=True)):
        state[i, Column.LENGTH] = len(row.prompt)
        state[i, Column.MAX_TOKENS] = row.max_tokens
        state[i, Column.MIN_TOKENS] = row.min_tokens
        state[i, Column.AUTOMATON] = begin
        state[i, Column.STOP_BEGIN] = -1
        history[i, : len(row.prompt)] = torch.tensor(row.prompt)
    tables = torch.arange(batch * width, dtype=torch.int32).view(batch, width) + 100
    ends = torch.tensor([[-1, END_TOKEN]] * batch)
    return StepState(
        state,
        history,
        bitmap([row.prompt for row in rows], vocab_size),
        torch.zeros(batch, vocab_size, dtype=torch.int32),
        ends,
        tables,
        torch.full((4, batch), -9),
        torch.full((batch,), -9, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    )


def texts():
    lengths = torch.tensor([0, *map(len, TEXTS)])
    data = torch.tensor(list(b"".join(TEXTS)), dtype=torch.uint8)
    return TokenTexts(data, lengths.cumsum(0).to(torch.int32))


def to(record, device):
    return type(record)(*(getattr(record, field.name).to(device) for field in fields(record)))


def run(device, rows, steps, **sizes):
    """All steps; returns the state and the inputs that each step left."""
    tables, begins = stop_tables(rows)
    state = to(start(rows, begins, **sizes), device)
    inputs = []
    for tokens in steps:
        given = to(texts(), device), to(tables, device), BLOCK_SIZE
        cuda.step_update.step_update(torch.tensor(tokens).to(device), state, *given)
        inputs.append((state.inputs.cpu().clone(), state.attention_lengths.cpu().clone()))
    return to(state, "cpu"), inputs


def assert_state(state, rows):
    for i, row in enumerate(rows):
        got = {column: int(state.rows[i, column]) for column in Column}
        assert got[Column.REASON] == row.reason
        assert got[Column.STOP_BEGIN] == row.stop_begin
        assert got[Column.TEXT_BYTES] == row.text_bytes
        assert got[Column.GENERATED] == len(row.generated)
        assert got[Column.LENGTH] == len(row.prompt) + len(row.generated)
        tokens = row.prompt + row.generated
        assert state.history[i, : len(tokens)].tolist() == tokens
        assert (state.history[i, len(tokens) :] == -7).all()
    assert torch.equal(state.seen, bitmap([r.prompt + r.generated for r in rows], len(TEXTS)))
    assert torch.equal(state.counts, counted([r.generated for r in rows], len(TEXTS)))
    assert int(state.finished) == sum(row.reason != Reason.RUNNING for row in rows)


STOPS = [b"a", b"ab", b"abc", b"cab", b"bb", b"bab", "가".encode(), b"aaaa"]


def any_row(chance):
    return Row(
        [chance.randrange(len(TEXTS)) for _ in range(chance.randrange(6))],
        chance.sample(STOPS, chance.randrange(4)),
        max_tokens=chance.randint(1, 12),
        min_tokens=chance.randint(0, 4),
    )


@pytest.mark.parametrize("seed", range(30))
def test_every_row_ends_as_the_engine_ends_it(device, seed):
    """Stops over several tokens and inside one, minimum lengths, end tokens, scores that are not
    finite; what comes after a row's end changes nothing."""
    chance = Random(seed)
    rows = [any_row(chance) for _ in range(chance.randint(1, 5))]
    usual = [*range(len(TEXTS) - 1)] * 3
    steps = [
        [chance.choice([*usual, END_TOKEN, -1]) for _ in rows] for _ in range(chance.randint(1, 9))
    ]
    state, inputs = run(device, rows, steps)
    for tokens, (left, lengths) in zip(steps, inputs, strict=True):
        for i, row in enumerate(rows):
            row.add(tokens[i])
            position = len(row.prompt) + len(row.generated) - 1
            if row.reason == Reason.RUNNING:
                block = 100 + 16 * i + position // BLOCK_SIZE
                assert left[:, i].tolist() == [tokens[i], position, block, position % BLOCK_SIZE]
                assert lengths[i] == position + 1
            else:
                assert (int(left[2, i]), int(lengths[i])) == (-1, 0)
    assert_state(state, rows)


def test_a_finished_row_stays_as_it_was(device):
    rows = [Row([1], stops=[b"b"]), Row([1])]
    state, _ = run(device, rows, [[2, 1], [1, 1], [1, 1]])
    for token in (2, 1, 1):
        rows[0].add(token)
    for _ in range(3):
        rows[1].add(1)
    assert rows[0].generated == [2]
    assert_state(state, rows)


def test_a_stop_does_not_begin_in_the_prompt(device):
    row = Row([1], stops=[b"ab"])
    state, _ = run(device, [row], [[2], [3]])
    assert state.rows[0, Column.REASON] == Reason.STOP_STRING
    assert state.rows[0, Column.STOP_BEGIN] == 1


def test_a_stop_that_the_first_tokens_complete_does_not_count(device):
    row = Row([1], stops=[b"b"], min_tokens=2)
    for token in (2, 2, 1, 2):
        row.add(token)
    state, _ = run(device, [row], [[2], [2], [1], [2]])
    assert row.stop_begin == 3
    assert_state(state, [row])


@pytest.mark.parametrize("sizes", [{"capacity": 3}, {"width": 1, "capacity": 9}])
def test_a_row_without_room_ends_before_it_writes_beyond(device, sizes):
    rows = [Row([1, 1]), Row([1])]
    state, inputs = run(device, rows, [[2, 2]] * 4, **sizes)
    limit = min(sizes["capacity"], sizes.get("width", 99) * BLOCK_SIZE)
    assert state.rows[:, Column.LENGTH].tolist() == [limit, min(limit, 5)]
    assert state.rows[0, Column.REASON] == Reason.NO_ROOM
    assert inputs[-1][0][2, 0] == -1


def test_more_rows_than_a_block_has_threads(device):
    rows = [Row([1], max_tokens=1 + i % 3) for i in range(130)]
    steps = [[i % 3 for i in range(130)]] * 2
    state, _ = run(device, rows, steps)
    for tokens in steps:
        for row, token in zip(rows, tokens, strict=True):
            row.add(token)
    assert_state(state, rows)


def test_bad_arguments_are_named():
    rows = [Row([1])]
    tables, begins = stop_tables(rows)
    state = start(rows, begins)
    with pytest.raises(ValueError, match="rows has shape"):
        cuda.step_update.step_update(torch.tensor([1, 2]), state, texts(), tables, BLOCK_SIZE)
    short = TokenTexts(texts().data, texts().starts[1:])
    with pytest.raises(ValueError, match="text starts has shape"):
        cuda.step_update.step_update(torch.tensor([1]), state, short, tables, BLOCK_SIZE)
