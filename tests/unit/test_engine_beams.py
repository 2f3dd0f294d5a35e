"""Beam search against the enumeration of every text."""

import itertools
import math

import pytest
import torch

from nightjar.gpu_worker.engine import BeamSearch
from nightjar.gpu_worker.engine.beams import BeamState, Candidate

VOCAB, LENGTH, END = 4, 4, 0


def log_probs(seed):
    """A model: log-probabilities after every text of up to LENGTH tokens."""
    generator = torch.Generator().manual_seed(seed)
    texts = [t for n in range(LENGTH) for t in itertools.product(range(VOCAB), repeat=n)]
    rows = (torch.randn(len(texts), VOCAB, generator=generator) * 2).double().log_softmax(-1)
    return {text: row.tolist() for text, row in zip(texts, rows, strict=True)}


def search(model, beams):
    state, running = BeamState(beams), [()]
    steps = 0
    while not state.done:
        steps += 1
        best = [
            sorted(enumerate(model[text]), key=lambda pair: -pair[1])[
                : state.candidates_per_beam(beams, 1)
            ]
            for text in running
        ]
        going = []
        for place, one in enumerate(state.candidates(best)):
            text = (*running[one.parent], one.token)
            if one.token != END and len(text) < LENGTH:
                going.append(one)
            elif state.may_finish(place):
                state.finish(text, one.total)
        running = [(*running[one.parent], one.token) for one in state.keep(going)]
    return state.finished, steps


def every_text(model, penalty):
    """All texts that end with END or at LENGTH: (text, total, score), best first."""
    found = []
    for text in model:
        for token in range(VOCAB):
            whole = (*text, token)
            if END not in text and (token == END or len(whole) == LENGTH):
                total = sum(model[whole[:n]][whole[n]] for n in range(len(whole)))
                found.append((whole, total, total / len(whole) ** penalty))
    return sorted(found, key=lambda one: -one[2])


@pytest.mark.parametrize("penalty", [0.0, 1.0, 1.7, -1.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_beam_as_wide_as_the_tree_finds_the_best_texts(seed, penalty):
    model = log_probs(seed)
    expected = every_text(model, penalty)
    width = len(expected)
    found, _ = search(model, BeamSearch(width, penalty))
    assert [one.output for one in found] == [text for text, _, _ in expected]
    assert [one.score for one in found] == pytest.approx([score for _, _, score in expected])
    assert [one.total for one in found] == pytest.approx([total for _, total, _ in expected])


def test_one_beam_is_greedy():
    model = log_probs(9)
    (found,), _ = search(model, BeamSearch(1))
    text = ()
    while len(text) < LENGTH and END not in text:
        text = (*text, max(range(VOCAB), key=model[text].__getitem__))
    assert found.output == text


def test_early_stopping_ends_with_enough_texts():
    """END always among the best: two texts are finished after two steps."""
    row = [math.log(p) for p in (0.4, 0.5, 0.06, 0.04)]
    model = dict.fromkeys(log_probs(0), row)
    found, steps = search(model, BeamSearch(2, 0.0, early_stopping=True))
    assert ([one.output for one in found], steps) == ([(0,), (1, 0)], 2)
    # Without a length penalty longer texts only get worse: the same, a step later.
    assert search(model, BeamSearch(2, 0.0)) == (found, 3)
    # With one, the longer texts of 1s come to be better.
    longer, steps = search(model, BeamSearch(2, 1.0))
    assert (longer[0].output, steps) == ((1, 1, 1, 1), 4)


def test_equal_sums_have_one_order():
    state = BeamState(BeamSearch(2))
    first = state.candidates([[(7, -1.0), (3, -1.0)]])
    assert first == [Candidate(0, 3, -1.0), Candidate(0, 7, -1.0)]
    assert state.keep(first) == first
    second = state.candidates([[(9, -1.0)], [(2, -1.0), (1, -0.5)]])
    assert second == [Candidate(1, 1, -1.5), Candidate(0, 9, -2.0), Candidate(1, 2, -2.0)]


def test_when_nothing_goes_on_the_search_is_over():
    state = BeamState(BeamSearch(3))
    assert not state.done
    state.finish("only", state.candidates([[(1, -1.0)]])[0].total)
    assert state.keep([]) == []
    assert state.done
    assert [one.output for one in state.finished] == ["only"]
