from random import Random

import pytest
import torch

from nightjar.kernels import cuda, reference
from tests.cuda_host import schedule
from tests.kernels_cuda.devices import random


def parameters(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, draw=0.5):
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.full((rows,), draw, dtype=torch.float64),
    )


def sampled(device, logits, given):
    return cuda.sample.sample(*(x.to(device) for x in (logits, *given))).cpu()


def weights(logits, temperature, top_k, top_p, min_p, slack):
    """The filtered softmax of one row in float64; slack widens (+) or narrows (-) each filter by
    what rounds differently."""
    scores = logits.double()
    scores = (scores - scores.max()) / max(temperature, 1e-30)
    kept = torch.ones_like(scores, dtype=torch.bool)
    if top_k:
        kth = scores.sort(descending=True).values[min(top_k, len(scores)) - 1]
        kept &= scores >= kth - slack
    probs = torch.where(kept, scores.exp(), 0.0)
    if top_p < 1:
        ordered = probs.sort(descending=True).values
        before = ordered.cumsum(0) - ordered
        inside = ordered[before < (top_p + slack) * ordered.sum()]
        least = inside.min().log() if inside.numel() else float("inf")
        kept &= scores >= least - slack
    kept &= scores.exp() >= min_p - slack
    return torch.where(kept, scores.exp(), 0.0)


def acceptable(logits, given, row):
    """Tokens whose share of the line of weights holds the draw, give or take rounding."""
    arguments = [float(x[row]) for x in given[:4]]
    arguments[1] = int(arguments[1])
    draw, found = float(given[4][row]), set()
    for slack in (-1e-5, 0.0, 1e-5):
        line = weights(logits[row], *arguments, slack)
        ends = line.cumsum(0) / line.sum()
        begins = ends - line / line.sum()
        near = (begins <= draw + 1e-5) & (ends >= draw - 1e-5) & (line > 0)
        found |= set(near.nonzero().squeeze(1).tolist())
    return found


@pytest.mark.parametrize("seed", range(24))
def test_a_draw_is_where_the_line_of_weights_has_it(device, seed):
    chance = Random(seed)
    logits = random(
        (1, chance.choice([1, 2, 31, 33, 300, 700])), seed=seed, scale=chance.choice([0.0, 1, 30])
    )
    given = parameters(
        1,
        temperature=chance.choice([1e-38, 0.3, 1.0, 2.5]),
        top_k=chance.choice([0, 1, 2, 7, 50, 5000]),
        top_p=chance.choice([1.0, 0.999, 0.9, 0.5, 1e-6]),
        min_p=chance.choice([0.0, 0.05, 1.0]),
        draw=chance.choice([0.0, 0.3, 0.77, 1 - 2**-53]),
    )
    assert int(sampled(device, logits, given)) in acceptable(logits, given, 0)


def test_the_reference_agrees_on_nearly_every_draw(device):
    """A draw that falls next to the edge of a token's share may fall on its other side."""
    rows = 12
    logits = random((rows, 700), seed=3, scale=2.0)
    given = parameters(rows, 0.8, 40, 0.9, 0.01)
    given = (*given[:4], reference.philox.uniform(*(torch.arange(rows) for _ in range(3))))
    assert torch.equal(sampled(device, logits, given), reference.sampling.sample(logits, *given))


@pytest.mark.parametrize("first", range(4))
def test_rows_that_begin_anywhere_give_the_same_tokens(device, first):
    """Wide loads, and single ones at the ends."""
    logits = random((1, 2600), seed=7, scale=2.0).expand(4, -1)
    given = parameters(4, 0.8, 300, 0.9, 0.001)
    given = (*given[:4], torch.tensor([0.0, 0.3, 0.8, 1 - 2**-53], dtype=torch.float64))
    wanted = sampled(device, logits.contiguous(), given)
    shifted = torch.full((first + logits.numel(),), float("nan")).to(device)
    shifted[first:] = logits.flatten().to(device)
    tokens = sampled(device, shifted[first:].view(4, -1), given)
    assert torch.equal(tokens, wanted)


@pytest.mark.parametrize("draw", [0.2, 1 - 2**-53])
@pytest.mark.parametrize(
    ("scale", "top_k", "top_p"),
    [
        (3.0, 50, 0.9),
        (3.0, 0, 0.5),
        (3.0, 3000, 1.0),
        (3.0, 3000, 0.9),
        (0.5, 0, 0.9),
        (0.5, 9, 0.9),
    ],
)
def test_thresholds_on_and_past_the_list_of_the_best(device, scale, top_k, top_p, draw):
    """Of 6,000 scores several hundred are listed: enough for the 50 best or for half of a peaked
    row's weight, too few for the 3,000 best or for most of a flat row's."""
    logits = random((1, 6000), seed=11, scale=scale)
    given = parameters(1, 0.7, top_k, top_p, draw=draw)
    assert int(sampled(device, logits, given)) in acceptable(logits, given, 0)


@pytest.mark.parametrize("half", [300, 3000])
def test_equal_scores_stay_or_go_together(device, half):
    """Also more of them than are worth a list of their own."""
    logits = torch.zeros(3, 2 * half)
    logits[:, half:] = 1.0
    given = parameters(3, top_k=5)
    given = (*given[:4], torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64))
    assert sampled(device, logits, given).tolist() == [half, half + half // 2, 2 * half - 1]


def test_a_temperature_of_zero_takes_the_best_with_ties_to_the_lowest(device):
    logits = random((3, 700))
    logits[1, [600, 80]] = 50.0
    tokens = sampled(device, logits, parameters(3, temperature=0.0))
    assert torch.equal(tokens, reference.sampling.argmax(logits)[0])
    assert tokens[1] == 80


def test_rows_of_all_kinds_share_a_batch(device):
    logits = random((4, 300))
    logits[2, 100] = float("nan")
    logits[3] = float("-inf")
    temperature, top_k, top_p, min_p, draws = parameters(4)
    temperature[0] = 0.0
    top_p[1] = 0.5
    tokens = sampled(device, logits, (temperature, top_k, top_p, min_p, draws)).tolist()
    assert tokens[0] == int(logits[0].argmax())
    assert tokens[1] in acceptable(logits, (temperature, top_k, top_p, min_p, draws), 1)
    assert tokens[2:] == [-1, -1]


def test_banned_tokens_are_never_drawn(device):
    logits = torch.zeros(4, 40)
    logits[:, 3:] = float("-inf")
    given = parameters(4)
    given = (*given[:4], torch.tensor([0.0, 0.4, 0.9, 1 - 2**-53], dtype=torch.float64))
    assert sampled(device, logits, given).tolist() == [0, 1, 2, 2]


@pytest.mark.parametrize("seed", range(1, 4))
def test_no_schedule_shows_a_race_or_changes_a_token(device, seed):
    logits = random((2, 700), seed=seed)
    given = parameters(2, 0.9, 20, 0.8, 0.01, 0.6)
    first = sampled(device, logits, given)
    with schedule(seed):
        assert torch.equal(sampled(device, logits, given), first)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="draws is float32"):
        cuda.sample.sample(torch.ones(2, 4), *parameters(2)[:4], torch.ones(2))
    with pytest.raises(ValueError, match="temperature has shape"):
        cuda.sample.sample(torch.ones(2, 4), *parameters(3))
    with pytest.raises(ValueError, match="vocabulary of 262145"):
        cuda.sample.sample(torch.ones(1, 2**18 + 1), *parameters(1))
