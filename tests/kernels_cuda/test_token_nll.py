import pytest
import torch

from nightjar.kernels import cuda, reference
from tests.kernels_cuda.devices import assert_near, random, storages


def wanted_nll(logits, rows, targets):
    return -logits.double().log_softmax(-1)[rows, targets]


@pytest.mark.parametrize("storage", storages)
@pytest.mark.parametrize("vocab_size", [1, 111, 512, 5000, 8801, 8808])
def test_rows_of_every_storage(device, storage, vocab_size):
    logits = random((4, vocab_size), storages[storage], scale=3.0)
    rows = torch.tensor([0, 0, 1, 3])
    targets = torch.tensor([0, vocab_size - 1, vocab_size // 2, 0])
    got = cuda.token_nll.token_nll(*(x.to(device) for x in (logits, rows, targets)))
    assert_near(got, wanted_nll(logits, rows, targets), absolute=1e-5)


def test_the_reference_agrees(device):
    hidden, weight = random((6, 16)), random((300, 16), seed=1)
    rows, targets = torch.tensor([1, 1, 2, 5]), torch.tensor([299, 0, 7, 8])
    logits = hidden @ weight.T
    wanted = reference.log_prob.target_nll(logits, rows, targets)
    got = cuda.token_nll.token_nll(*(x.to(device) for x in (logits, rows, targets)))
    assert_near(got, wanted, ulps=16, absolute=1e-5)


def test_a_row_that_nothing_is_predicted_from_is_not_read(device):
    logits = random((3, 64))
    logits[1] = float("nan")
    rows, targets = torch.tensor([0, 2]), torch.tensor([5, 6])
    got = cuda.token_nll.token_nll(*(x.to(device) for x in (logits, rows, targets)))
    assert_near(got, wanted_nll(logits, rows, targets), absolute=1e-5)


def test_many_targets_of_one_row(device):
    logits = random((1, 700))
    rows, targets = torch.zeros(700, dtype=torch.int64), torch.arange(700)
    got = cuda.token_nll.token_nll(*(x.to(device) for x in (logits, rows, targets)))
    assert_near(got, wanted_nll(logits, rows, targets), absolute=1e-5)


def test_large_scores(device):
    logits = random((3, 2000), scale=1000.0)
    logits[1, 1:] = -3e38
    rows, targets = torch.arange(3), torch.tensor([1600, 0, 3])
    got = cuda.token_nll.token_nll(*(x.to(device) for x in (logits, rows, targets)))
    assert_near(got, wanted_nll(logits, rows, targets), absolute=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 999])
def test_a_score_that_is_not_finite_is_told_wherever_it_is(device, place, value):
    logits = random((2, 1000))
    logits[0, place] = value
    rows, targets = torch.tensor([0, 1]), torch.tensor([500, 3])
    got = cuda.token_nll.token_nll(*(x.to(device) for x in (logits, rows, targets))).cpu()
    assert got.isnan().tolist() == [True, False]


def test_a_row_of_nothing_but_infinities_is_told(device):
    logits = torch.full((1, 700), float("-inf"))
    rows, targets = torch.tensor([0, 0]), torch.tensor([5, 699])
    got = cuda.token_nll.token_nll(*(x.to(device) for x in (logits, rows, targets))).cpu()
    assert got.isnan().all()


def test_a_target_outside_the_vocabulary_is_nan(device):
    logits, rows = random((2, 64)), torch.tensor([0, 0, 1])
    targets = torch.tensor([64, 3, -1])
    got = cuda.token_nll.token_nll(*(x.to(device) for x in (logits, rows, targets))).cpu()
    assert got.isnan().tolist() == [True, False, True]


def test_rows_at_a_stride(device):
    wide = random((3, 200), torch.float16)
    logits, rows, targets = wide[:, :100], torch.arange(3), torch.tensor([1, 2, 99])
    given = wide.to(device)[:, :100], rows.to(device), targets.to(device)
    assert_near(cuda.token_nll.token_nll(*given), wanted_nll(logits, rows, targets), absolute=1e-5)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="targets has shape"):
        cuda.token_nll.token_nll(torch.ones(2, 4), torch.arange(2), torch.arange(3))
    with pytest.raises(ValueError, match="side by side"):
        cuda.token_nll.token_nll(torch.ones(4, 2).T, torch.arange(2), torch.arange(2))
