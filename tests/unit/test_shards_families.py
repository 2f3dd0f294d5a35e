"""Every family split over ranks, in threads of one process, against the whole model."""

import pytest
import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.models.split import shard_counts
from tests.families import CASES, save_family
from tests.models import SENTENCES, Gpt2Shape, save_gpt2
from tests.shards import answers, assert_same, every_kind, first_logits, thread_leader

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 2e-5
"""Of a log-probability or a mean likelihood in FP32 (nats)."""
ROUNDED = {"fp64": 1e-6, "fp32": 1e-5, "bf16": 0.03, "int8": 0.03}
"""Of a score, as a share of the largest one."""

FAMILIES = {
    **CASES,
    "gpt2": Gpt2Shape(),
    "gpt2, odd sizes": Gpt2Shape(n_layer=3, n_embd=66, n_head=6, n_inner=77, vocab_size=521),
    "gpt2, untied": Gpt2Shape(tied=False, prefix=False, activation="gelu", vocab_size=515),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory):
    case = FAMILIES[request.param]
    path = tmp_path_factory.mktemp("family") / "model"
    save = save_gpt2 if isinstance(case, Gpt2Shape) else save_family
    return ModelDirectory.open(save(path, case, seed=5))


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request, family):
    if request.param not in shard_counts(family.config):
        pytest.skip("the heads do not divide")
    return request.param


def test_shards_answer_as_the_whole_model(family, ranks):
    """Generation, sampling, beams, penalties, prefixes, prompt vectors, ranking, log-probabilities;
    the cache is small, so that blocks are copied, evicted and drawn again."""
    token_bytes = family.tokenizer().token_bytes
    requests = every_kind(family.config.vocab_size, family.config.context_length - 12)
    small = {"max_step_tokens": 64, "block_size": 16}
    expected = answers(load_model(family, "fp32"), token_bytes, requests, **small)
    with thread_leader(family, ranks) as leader:
        found = answers(leader.load("fp32"), token_bytes, requests, **small)
    assert_same(found, expected, TOLERANCE)


@pytest.mark.parametrize("dtype", list(ROUNDED))
def test_scores_are_within_the_tolerance_of_the_precision(family, dtype):
    token_bytes = family.tokenizer().token_bytes
    prompts = [
        ids[: 1 + 11 * i] for i, ids in enumerate(family.tokenizer().encode_batch(list(SENTENCES)))
    ]
    expected = first_logits(load_model(family, dtype), token_bytes, prompts)
    with thread_leader(family, 2) as leader:
        found = first_logits(leader.load(dtype), token_bytes, prompts)
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDED[dtype] * largest)
