from random import Random

import pytest
import torch

from nightjar import kernels
from nightjar.kernels import cuda
from tests.kernels_cuda.devices import random
from tests.kernels_cuda.penalised import bitmap, counted


def reference(logits, prompts, generated, penalties):
    """kernels.penalize_tokens, over each row's tokens once."""
    rows, ids = [], []
    for row, seen in enumerate(zip(prompts, generated, strict=True)):
        tokens = sorted({*seen[0], *seen[1]})
        rows += [row] * len(tokens)
        ids += tokens
    rows, ids = (torch.tensor(x, dtype=torch.int64) for x in (rows, ids))
    counts = counted(generated, logits.shape[1])[rows, ids].float()
    wanted = logits.clone()
    kernels.penalize_tokens(wanted, rows, ids, counts, *(p[rows] for p in penalties))
    return wanted


def penalise(device, logits, prompts, generated, penalties):
    vocab_size = logits.shape[1]
    seen = bitmap([p + g for p, g in zip(prompts, generated, strict=True)], vocab_size)
    changed = logits.clone().to(device)
    given = [x.to(device) for x in (seen, counted(generated, vocab_size), *penalties)]
    cuda.penalties.penalize(changed, *given)
    return changed.cpu()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 4200])
def test_the_reference_agrees_to_the_last_bit(device, vocab_size, seed):
    """Tokens seen many times, in prompt and text alike, are penalised once."""
    chance = Random(seed)
    prompts, generated = (
        [[chance.randrange(vocab_size) for _ in range(chance.randrange(12))] for _ in range(3)]
        for _ in range(2)
    )
    logits = random((3, vocab_size), seed=seed)
    penalties = (
        torch.tensor([1.3, 1.0, 0.7]),
        torch.tensor([0.5, 0.0, -1.0]),
        torch.tensor([0.25, 0.0, 0.1]),
    )
    got = penalise(device, logits, prompts, generated, penalties)
    assert torch.equal(got, reference(logits, prompts, generated, penalties))


def test_a_row_without_penalties_is_not_touched(device):
    logits = random((2, 64))
    off = torch.ones(2), torch.zeros(2), torch.zeros(2)
    got = penalise(device, logits, [[1, 2], [3]], [[1], [5]], off)
    assert torch.equal(got, logits)


def test_bits_past_the_vocabulary_reach_nothing(device):
    """A bitmap's last word has more bits than the vocabulary has tokens: the next row's scores
    lie there."""
    logits = random((2, 40))
    seen = torch.full((2, 2), -1, dtype=torch.int32)
    penalties = torch.tensor([2.0, 1.0]), torch.zeros(2), torch.zeros(2)
    counts = torch.zeros(2, 40, dtype=torch.int32)
    changed = logits.clone().to(device)
    cuda.penalties.penalize(changed, *(x.to(device) for x in (seen, counts, *penalties)))
    everything = [list(range(40)), []]
    assert torch.equal(changed.cpu(), reference(logits, everything, [[], []], penalties))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.ones(2, 40).half()}, "logits is float16"),
        ({"seen": torch.zeros(2, 1, dtype=torch.int32)}, "seen has shape"),
        ({"counts": torch.zeros(2, 39, dtype=torch.int32)}, "counts has shape"),
        ({"presence": torch.zeros(3)}, "presence has shape"),
    ],
)
def test_bad_arguments_are_named(change, message):
    given = {
        "logits": torch.ones(2, 40),
        "seen": torch.zeros(2, 2, dtype=torch.int32),
        "counts": torch.zeros(2, 40, dtype=torch.int32),
        "repetition": torch.ones(2),
        "presence": torch.zeros(2),
        "frequency": torch.zeros(2),
    }
    with pytest.raises(ValueError, match=message):
        cuda.penalties.penalize(**(given | change))
