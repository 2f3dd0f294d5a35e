import random

import pytest
import torch

from nightjar.kernels import cuda, reference


@pytest.mark.parametrize("seed", range(8))
def test_the_reference_agrees_to_the_last_bit(device, seed):
    chance = random.Random(seed)
    ends = [(-(2**63), -1, 0, 2**63 - 1), (0, 2**32 - 1), (0, 2**32 - 1, 2**32, 2**63 - 1)]
    spans = [(-(2**63), 2**63 - 1), (0, 2**32 - 1), (0, 2**63 - 1)]
    given = [
        torch.tensor([*end, *(chance.randint(*span) for _ in range(9 - len(end)))])
        for end, span in zip(ends, spans, strict=True)
    ]
    got = cuda.philox.uniform(*(x.to(device) for x in given))
    assert torch.equal(got.cpu(), reference.philox.uniform(*given))


def test_more_numbers_than_a_block_has_threads(device):
    given = torch.arange(300), torch.arange(300) % 7, torch.arange(300) // 3
    got = cuda.philox.uniform(*(x.to(device) for x in given))
    assert torch.equal(got.cpu(), reference.philox.uniform(*given))


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="streams has shape"):
        cuda.philox.uniform(torch.arange(3), torch.arange(2), torch.arange(3))
