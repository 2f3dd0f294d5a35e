"""Bias, penalties, blocked tokens and the best log-probabilities, against loops in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nightjar import kernels

INF = float("inf")


def scores(rows, vocab, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * 4


def penalized(logit, count, repetition, presence, frequency):
    """One seen token, as CTRL's paper and OpenAI's documentation say, in Python's floats."""
    logit = logit / repetition if logit > 0 else logit * repetition
    return logit - count * frequency - (count > 0) * presence


def test_blocked_tokens():
    logits = scores(3, 50)
    expected = logits.clone()
    expected[0, [4, 7]] = -INF
    expected[2, 49] = -INF
    kernels.block_tokens(logits, torch.tensor([0, 0, 2]), torch.tensor([4, 7, 49]))
    assert torch.equal(logits, expected)


def test_bias():
    logits = scores(2, 9)
    expected = logits.clone()
    expected[1, 3] += 2.5
    expected[1, 0] -= 100
    expected[0, 3] += 1
    rows, ids = torch.tensor([1, 1, 0]), torch.tensor([3, 0, 3])
    kernels.bias_tokens(logits, rows, ids, torch.tensor([2.5, -100.0, 1.0]))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("repetition", [1.0, 1.3, 0.5])
@pytest.mark.parametrize("presence", [0.0, 1.5, -2.0])
@pytest.mark.parametrize("frequency", [0.0, 0.7, -1.0])
def test_penalties(repetition, presence, frequency):
    logits = scores(2, 40)
    logits[0, 3] = 0.0
    expected = logits.double()
    counts = {(0, 3): 0, (0, 39): 2, (1, 0): 1, (1, 3): 7}
    for (row, token), count in counts.items():
        expected[row, token] = penalized(
            float(logits[row, token]), count, repetition, presence, frequency
        )
    places = torch.tensor(list(counts)).unbind(1)
    each = (torch.full((4,), x) for x in (repetition, presence, frequency))
    kernels.penalize_tokens(logits, *places, torch.tensor([0.0, 2.0, 1.0, 7.0]), *each)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_blocked_token_stays_blocked():
    logits = torch.full((1, 5), -INF)
    place = torch.tensor([0]), torch.tensor([2])
    one = torch.ones(1)
    kernels.bias_tokens(logits, *place, one * 100)
    kernels.penalize_tokens(logits, *place, one, one * 0.01, one * -2, one * -2)
    assert torch.equal(logits, torch.full((1, 5), -INF))


def best(row, count):
    """The best of one row by a sort on (-value, id)."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    return [row[i] for i in order], order


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 25),
    st.sampled_from([1, 20, 300]),
    st.sampled_from([0, 1, 4]),
)
def test_top_log_probs(seed, count, vocab, digits):
    """Rounded, so that many are equal: the lowest ids come first, at the border too."""
    log_probs = (scores(3, vocab, seed) / 4).round(decimals=digits)
    values, ids = kernels.top_log_probs(log_probs, count)
    for row in range(3):
        expected = best(log_probs[row].tolist(), count)
        assert (values[row].tolist(), ids[row].tolist()) == expected


def test_top_log_probs_do_not_depend_on_the_batch_or_the_count():
    log_probs = scores(9, 3001).round(decimals=1).log_softmax(-1)
    values, ids = kernels.top_log_probs(log_probs, 20)
    for row in range(9):
        alone = scores(9, 3001).round(decimals=1)[row : row + 1].log_softmax(-1)
        assert torch.equal(alone[0], log_probs[row])
        few_values, few_ids = kernels.top_log_probs(alone, 5)
        assert torch.equal(few_values[0], values[row, :5])
        assert torch.equal(few_ids[0], ids[row, :5])


def test_top_log_probs_beside_a_row_of_nan():
    log_probs = scores(2, 30)
    expected = best(log_probs[1].tolist(), 4)
    log_probs[0] = float("nan")
    values, ids = kernels.top_log_probs(log_probs, 4)
    assert (values[1].tolist(), ids[1].tolist()) == expected
