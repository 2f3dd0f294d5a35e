"""Choosing tokens: filters, randomness and the distribution that comes out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nightjar import kernels
from nightjar.kernels.reference.philox import philox_4x32
from tests.backends import BACKENDS, use_backend


def draw(logits, draws, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    rows = logits.shape[0]
    return kernels.sample(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        draws,
    )


def filtered_softmax(logits, temperature, top_k, top_p, min_p=0.0):
    """One row, in float64, by sorting: temperature, top-k, top-p, min-p; ties stay together."""
    scores = logits.double() / temperature
    if top_k:
        kth = scores.sort(descending=True).values[min(top_k, len(scores)) - 1]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    probs = scores.softmax(-1)
    if top_p < 1:
        ordered = probs.sort(descending=True).values
        before = ordered.cumsum(0) - ordered
        least = ordered[before < top_p][-1]
        probs = torch.where(probs >= least, probs, 0.0)
    probs = torch.where(probs >= min_p * probs.max(), probs, 0.0)
    return probs / probs.sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_argmax_takes_the_lowest_of_equals(backend, monkeypatch):
    use_backend(backend, monkeypatch)
    logits = torch.zeros(5, 5000)
    logits[1, [70, 71, 4000]] = 2.0
    logits[2, :4990] = -1.0
    logits[3, 600:] = -0.0  # equal to 0, though its bits are not
    logits[4] = float("-inf")
    tokens, finite = kernels.argmax(logits)
    assert tokens.tolist() == [0, 70, 4990, 0, 0]
    assert finite.tolist() == [True] * 4 + [False]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 15, 17, 511, 512, 513, 32_000])
def test_argmax_finds_the_best_wherever_it_is(backend, width, monkeypatch):
    use_backend(backend, monkeypatch)
    logits = torch.randn(40, width, generator=torch.Generator().manual_seed(width))
    logits[0, -1] = 9.0
    tokens, finite = kernels.argmax(logits)
    assert torch.equal(tokens, logits.double().argmax(-1))
    assert finite.all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 5, 16, 1001])
def test_a_row_is_finite_if_all_of_it_is(backend, width, monkeypatch):
    use_backend(backend, monkeypatch)
    most = torch.finfo(torch.float32).max
    fine = torch.randn(3, width).masked_fill_(torch.rand(3, width) < 0.3, -most)
    fine[2] = most  # whose sum is not
    for spoilt in ("nan", "inf", "-inf"):
        for place in {0, width // 2, width - 1}:
            rows = fine.clone()
            rows[1, place] = float(spoilt)
            assert kernels.argmax(rows)[1].tolist() == [True, False, True]
    assert kernels.argmax(fine)[1].tolist() == [True, True, True]
    assert kernels.argmax(fine[:0])[1].tolist() == []


def test_philox_equals_the_published_vectors():
    """Known answers of Random123: counter and key all zeros, and all ones."""
    zero = np.zeros(1, dtype=np.uint64)
    words = philox_4x32(zero, zero, zero, zero, zero)
    assert [int(w[0]) for w in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_uniform_depends_on_seed_stream_and_step_alone():
    seeds = torch.tensor([1, 2, -1, 2**62])
    steps = torch.tensor([0, 5, 7, 0])
    streams = torch.tensor([0, 0, 3, 127])
    together = kernels.uniform(seeds, streams, steps)
    given = (seeds, streams, steps)
    alone = [kernels.uniform(*(x[i : i + 1] for x in given)) for i in (3, 2, 1, 0)]
    assert together.tolist() == [float(x) for x in reversed(alone)]
    assert ((together >= 0) & (together < 1)).all()


def test_uniform_is_uniform():
    """Over the steps of a sample, over the samples of a request, over seeds."""
    fixed, running = torch.full((20_000,), 9), torch.arange(20_000)
    for seed, stream, step in (
        (fixed, fixed, running),
        (fixed, running, fixed),
        (running, fixed, fixed),
    ):
        draws = kernels.uniform(seed, stream, step)
        assert len(draws.unique()) == 20_000
        counts = torch.histc(draws.float(), bins=20, min=0, max=1)
        chi_square = ((counts - 1000) ** 2 / 1000).sum()
        assert chi_square < 43.8  # 99.9% quantile of 19 degrees of freedom


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.3, 12, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (0.9, 20, 0.7, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.8, 0, 0.9, 0.05),
        (0.8, 15, 0.95, 0.02),
        (2.0, 0, 1.0, 1.0),
    ],
)
def test_draws_follow_the_filtered_softmax(temperature, top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(60, generator=generator) * 1.5
    expected = filtered_softmax(logits, temperature, top_k, top_p, min_p)
    n = 20_000
    draws = kernels.uniform(torch.full((n,), 5), torch.arange(n) % 128, torch.arange(n) // 128)
    tokens = draw(logits.repeat(n, 1), draws, temperature, top_k, top_p, min_p)
    counts = torch.bincount(tokens, minlength=60).double()
    assert (counts[expected == 0] == 0).all()
    usable = expected * n >= 5
    error = (counts - expected * n)[usable] ** 2 / (expected * n)[usable]
    degrees = max(1, int(usable.sum()) - 1)
    # Mean and deviation of chi-square; five deviations are far beyond chance.
    assert error.sum() < degrees + 5 * (2 * degrees) ** 0.5 + 5


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 1, 2, 7, 1500, 5000]),
    top_p=st.sampled_from([1.0, 0.999999, 0.95, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.001, 0.3, 1.0]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 30.0]),
    place=st.sampled_from([0.0, 0.3, 0.999999999999]),
)
def test_a_draw_is_never_outside_the_filter(seed, temperature, top_k, top_p, min_p, spread, place):
    """Rows of all shapes, from flat to a single peak."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 2048, generator=generator).round(decimals=1) * spread
    token = draw(logits, torch.tensor([place]).double(), temperature, top_k, top_p, min_p)
    scores = (logits / torch.tensor(temperature)).double()[0]
    if top_k:
        assert scores[token] >= scores.sort(descending=True).values[min(top_k, 2048) - 1]
    # Nearly as much, for what rounds differently in float32.
    allowed = filtered_softmax(scores, 1.0, top_k, min(1.0, top_p * (1 + 1e-6)), min_p * 0.9999)
    assert allowed[token] > 0


def test_rows_do_not_depend_on_their_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 3000, generator=generator)
    temperature = torch.linspace(0.5, 1.5, 8)
    top_k = torch.tensor([0, 5, 0, 2000, 1, 0, 40, 0])
    top_p = torch.tensor([1.0, 0.9, 0.5, 1.0, 1.0, 0.9999, 0.3, 0.99])
    min_p = torch.tensor([0.0, 0.0, 0.1, 0.5, 0.0, 0.01, 0.0, 1.0])
    draws = kernels.uniform(torch.arange(8), torch.zeros(8).long(), torch.arange(8))
    together = kernels.sample(logits, temperature, top_k, top_p, min_p, draws)
    for i in range(8):
        parts = (x[i : i + 1] for x in (logits, temperature, top_k, top_p, min_p, draws))
        assert kernels.sample(*parts) == together[i]


def test_a_temperature_next_to_zero_is_greedy():
    logits = torch.randn(5, 50) * 20
    for temperature in (1e-3, 1e-38, 1e-44):
        draws = torch.full((5,), 0.999).double()
        assert torch.equal(draw(logits, draws, temperature), logits.argmax(-1))


def test_banned_scores_are_never_drawn():
    logits = torch.zeros(4, 10)
    logits[:, 3:] = float("-inf")
    draws = torch.tensor([0.0, 0.4, 0.9, 1 - 2**-53]).double()
    assert draw(logits, draws).tolist() == [0, 1, 2, 2]
