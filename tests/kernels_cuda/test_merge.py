import pytest
import torch

from nightjar.kernels import cuda, reference
from tests.kernels_cuda.devices import assert_near, poisoned, random, storages


@pytest.mark.parametrize("storage", storages)
@pytest.mark.parametrize("head_size", [64, 80, 37])
def test_two_sets_as_the_reference(device, storage, head_size):
    out_a, out_b = (random((5, 3, head_size), storages[storage], seed=i) for i in (1, 2))
    lse_a, lse_b = (random((5, 3), seed=i, scale=5.0) for i in (3, 4))
    wanted = reference.merge.merge_attention(
        out_a.double(), lse_a.double(), out_b.double(), lse_b.double()
    )
    got = cuda.merge.merge_attention(*(x.to(device) for x in (out_a, lse_a, out_b, lse_b)))
    assert_near(got, wanted)


def test_an_empty_set_is_not_read(device):
    out = random((2, 1, 64))
    lse = torch.tensor([[3.0], [float("-inf")]])
    empty, nothing = poisoned((2, 1, 64), torch.float32), torch.full((2, 1), float("-inf"))
    out[1] = float("nan")
    given = [x.to(device) for x in (out, lse, empty, nothing)]
    got = cuda.merge.merge_attention(*given).cpu()
    assert torch.equal(got[0], out[0])
    assert torch.equal(got[1], torch.zeros(1, 64))
    swapped = cuda.merge.merge_attention(*given[2:], *given[:2]).cpu()
    assert torch.equal(swapped, got)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="lse_b has shape"):
        cuda.merge.merge_attention(
            torch.ones(2, 3, 4), torch.ones(2, 3), torch.ones(2, 3, 4), torch.ones(2, 4)
        )
    with pytest.raises(ValueError, match="out_a is not contiguous"):
        cuda.merge.merge_attention(
            torch.ones(3, 2, 4).transpose(0, 1), torch.ones(2, 3), torch.ones(2, 3, 4), None
        )
