import pytest
import torch

from nightjar.kernels import cuda_ops, reference
from nightjar.kernels.cuda.merge import SPLIT, merge_splits
from tests.kernels_cuda.devices import assert_near, poisoned, random, storages


@pytest.mark.parametrize("storage", storages)
@pytest.mark.parametrize("head_size", [64, 80, 37])
def test_two_sets_as_the_reference(device, storage, head_size):
    out_a, out_b = (random((5, 3, head_size), storages[storage], seed=i) for i in (1, 2))
    lse_a, lse_b = (random((5, 3), seed=i, scale=5.0) for i in (3, 4))
    wanted = reference.merge.merge_attention(
        out_a.double(), lse_a.double(), out_b.double(), lse_b.double()
    )
    got = cuda_ops.merge_attention(*(x.to(device) for x in (out_a, lse_a, out_b, lse_b)))
    assert_near(got, wanted)


def test_an_empty_set_is_not_read(device):
    out = random((2, 1, 64))
    lse = torch.tensor([[3.0], [float("-inf")]])
    empty, nothing = poisoned((2, 1, 64), torch.float32), torch.full((2, 1), float("-inf"))
    out[1] = float("nan")
    given = [x.to(device) for x in (out, lse, empty, nothing)]
    got = cuda_ops.merge_attention(*given).cpu()
    assert torch.equal(got[0], out[0])
    assert torch.equal(got[1], torch.zeros(1, 64))
    swapped = cuda_ops.merge_attention(*given[2:], *given[:2]).cpu()
    assert torch.equal(swapped, got)


@pytest.mark.parametrize("splits", [4, 8, 70])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128])
def test_splits_are_summed_up_to_the_length(device, head_size, splits):
    """Also more than are asked for at once, and more than a warp weighs at once."""
    lengths = [0, 1, SPLIT, SPLIT + 1, (splits - 1) * SPLIT, splits * SPLIT]
    parts = random((6, 2, splits, head_size))
    shape = (6, 2, splits)
    stats = torch.stack((random(shape, seed=1, scale=9.0), random(shape).exp()), -1)
    wanted = torch.zeros(6, 2, head_size, dtype=torch.float64)
    wanted_lse = torch.full((6, 2), float("-inf"), dtype=torch.float64)
    for row, length in enumerate(lengths):
        n = -(-length // SPLIT)
        if n:
            weights = (stats[row, :, :n, 0].double()).exp()
            total = (weights * stats[row, :, :n, 1]).sum(-1)
            sums = (weights.unsqueeze(-1) * parts[row, :, :n]).sum(1)
            wanted[row], wanted_lse[row] = sums / total.unsqueeze(-1), total.log()
        parts[row, :, n:] = stats[row, :, n:] = float("nan")
    out = poisoned((6, 2, head_size), torch.bfloat16).to(device)
    lse = poisoned((6, 2), torch.float32).to(device)
    given = parts.to(device), stats.to(device), torch.tensor(lengths, dtype=torch.int32).to(device)
    merge_splits(*given, out, lse)
    assert_near(out, wanted, absolute=1e-5)
    assert_near(lse, wanted_lse, absolute=1e-5)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="lse_b has shape"):
        cuda_ops.merge_attention(
            torch.ones(2, 3, 4), torch.ones(2, 3), torch.ones(2, 3, 4), torch.ones(2, 4)
        )
    with pytest.raises(ValueError, match="out_a is not contiguous"):
        cuda_ops.merge_attention(
            torch.ones(3, 2, 4).transpose(0, 1), torch.ones(2, 3), torch.ones(2, 3, 4), None
        )
