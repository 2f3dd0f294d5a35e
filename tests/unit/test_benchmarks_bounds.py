"""The bare forward does the products that a decoder must do, and the accuracy report counts
what it says."""

from collections import Counter
from dataclasses import replace
from math import log

import pytest
import torch

from benchmarks import own
from benchmarks.accuracy import Answers, agreement
from benchmarks.fp8_accuracy import losses
from nightjar.kernels import linear
from tests.models import Gpt2Shape, save_gpt2

SHAPE = Gpt2Shape(n_layer=3, n_embd=32, n_head=4, vocab_size=600)
QKV, OUT, UP, DOWN, HEAD = (32, 96), (32, 32), (32, 128), (128, 32), (32, 600)


@pytest.fixture
def products(monkeypatch):
    """How often each (rows, in, out) was multiplied, in one pass."""
    counts = Counter()

    def counted(x, weight, *args, **options):
        counts[x.shape[0], x.shape[1], weight.out_features] += 1
        return linear(x, weight, *args, **options)

    monkeypatch.setattr(own, "linear", counted)
    monkeypatch.setattr(own, "REPEATS", 1)
    return counts


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("heads", [2, 4])  # the compiled attention takes 16 channels a head, not 8
def test_prefill_multiplies_all_rows_and_past_the_last_attention_the_wanted(
    tmp_path, products, dtype, heads
):
    shape = replace(SHAPE, n_head=heads)
    assert own.prefill_rate(save_gpt2(tmp_path, shape), dtype) > 0
    all_rows, wanted = 512, 4
    passes = 2  # the first, untimed, and one timed
    expected = Counter({(all_rows, *QKV): 3, (wanted, *HEAD): 1})
    for size in (OUT, UP, DOWN):
        expected[(all_rows, *size)] += 2
        expected[(wanted, *size)] += 1
    assert products == Counter({key: passes * count for key, count in expected.items()})


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("heads", [2, 4])
def test_decode_multiplies_one_row_a_sequence(tmp_path, products, batch, heads):
    model = save_gpt2(tmp_path, replace(SHAPE, n_head=heads))
    rate = own.decode_rate(model, "fp32", batch, context=33)
    assert rate > 0
    expected = {(batch, *size): 3 * 2 for size in (QKV, OUT, UP, DOWN)} | {(batch, *HEAD): 2}
    assert products == Counter(expected)


def test_agreement_counts_texts_tokens_scores_and_winners():
    exact = Answers([[1, 2, 3, 4], [5, 6]], [[1.0, 2.0], [3.0, 2.5], [1.0, 4.0]])
    found = Answers([[1, 2, 9, 4, 4], [5, 6]], [[1.5, 2.0], [2.0, 2.5], [1.0, 4.0]])
    assert agreement(found, exact) == {
        "equal_texts": 0.5,
        "equal_first_tokens": 1.0,
        "mean_abs_delta_nll": 0.25,
        "max_abs_delta_nll": 1.0,
        "equal_winners": round(2 / 3, 4),
        "equal_orders": round(2 / 3, 4),
        "texts": 2,
        "rankings": 3,
    }
    longer = Answers([[1]], [[1.0, 3.0, 2.0]])
    swapped = agreement(Answers([[1]], [[1.0, 2.0, 3.0]]), longer)
    assert (swapped["equal_winners"], swapped["equal_orders"]) == (1.0, 0.0)
    itself = agreement(exact, exact)
    assert itself["equal_texts"] == itself["equal_winners"] == 1.0
    assert itself["max_abs_delta_nll"] == 0.0


def test_losses_and_divergences_are_those_of_the_formulas():
    """Of two texts: the second diverges, and another token is its likeliest."""
    even, skewed = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.25, 0.5, 0.25]).log()
    texts = [[0, 2, 0], [1, 1]]
    exact = [torch.stack((even, even)), even[None]]
    found = losses(texts, [exact[0], skewed[None]], exact)
    assert found["loss"] == pytest.approx((log(4) + log(2) + log(2)) / 3, abs=1e-5)
    divergence = 0.5 * log(2) - 0.25 * log(2)
    assert found["mean_divergence"] == pytest.approx(divergence / 3, abs=1e-6)
    assert found["equal_next_tokens"] == round(2 / 3, 4)
    assert found["read_tokens"] == 3
