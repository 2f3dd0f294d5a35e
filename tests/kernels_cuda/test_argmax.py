import pytest
import torch

from nightjar.kernels import cuda, reference
from tests.kernels_cuda.devices import random


def best(device, logits):
    finite = torch.zeros(logits.shape[0], dtype=torch.bool, device=device)
    return cuda.argmax.best_tokens(logits.to(device), finite).cpu(), finite.cpu()


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 512, 513, 3001, 9001])
def test_the_reference_agrees(device, vocab_size):
    logits = random((4, vocab_size), seed=vocab_size)
    tokens, finite = best(device, logits)
    assert torch.equal(tokens, reference.sampling.argmax(logits)[0])
    assert finite.all()


def test_ties_go_to_the_lowest_id(device):
    logits = torch.zeros(4, 1500)
    logits[1, [1400, 70, 71]] = 2.0
    logits[2] = float("-inf")
    logits[3, 600:] = -0.0  # equal to 0, though its bits are not
    assert best(device, logits)[0].tolist() == [0, 70, 0, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_with_a_score_that_is_no_number_is_told(device, bad):
    logits = random((3, 700))
    logits[1, 600] = bad
    tokens, finite = best(device, logits)
    assert finite.tolist() == [True, False, True]
    assert tokens[1] == 600


def test_a_row_of_banned_tokens_is_told(device):
    logits = torch.full((1, 40), float("-inf"))
    assert best(device, logits)[1].tolist() == [False]


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="logits is float16"):
        cuda.argmax.best_tokens(torch.ones(2, 4).half())
    with pytest.raises(ValueError, match="no vocabulary"):
        cuda.argmax.best_tokens(torch.ones(2, 0))
    with pytest.raises(ValueError, match="finite has shape"):
        cuda.argmax.best_tokens(torch.ones(2, 4), torch.ones(3, dtype=torch.bool))
