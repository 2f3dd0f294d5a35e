"""Every family split over ranks, in threads of one process, against the whole model."""

import pytest
import torch

from nightjar.checkpoints import ModelDirectory, shard_counts
from nightjar.gpu_worker.models import load_model
from tests.families import CASES, save_family
from tests.models import SENTENCES, Gpt2Shape, save_gpt2
from tests.shards import answers, assert_same, every_kind, first_logits, thread_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 2e-5
"""Of a log-probability or a mean likelihood in FP32 (nats)."""
EXACT = {"fp64": 1e-6, "fp32": 1e-5}
"""Of a score, as a share of the largest one."""
NO_WORSE = 1.25
"""Sums of rounded parts: the root mean square error against FP32, over the whole model's own."""

FAMILIES = {
    **CASES,
    "gpt2": Gpt2Shape(),
    "gpt2, odd sizes": Gpt2Shape(n_layer=3, n_embd=66, n_head=6, n_inner=77, vocab_size=521),
    "gpt2, untied": Gpt2Shape(tied=False, prefix=False, activation="gelu", vocab_size=515),
}


def opened(name, folder):
    case = FAMILIES[name]
    save = save_gpt2 if isinstance(case, Gpt2Shape) else save_family
    return ModelDirectory.open(save(folder / "model", case, seed=5))


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory):
    return opened(request.param, tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module", params=["gpt2, untied", "polyglot", "llama", "hyperclova x"])
def some_family(request, tmp_path_factory):
    return opened(request.param, tmp_path_factory.mktemp("family"))


def test_shards_answer_as_the_whole_model(family):
    """Generation, sampling, beams, penalties, prefixes, prompt vectors, ranking, log-probabilities,
    on two to four ranks where the heads divide; the cache is small, so that blocks are copied,
    evicted and drawn again."""
    token_bytes = family.tokenizer().token_bytes
    requests = every_kind(family.config.vocab_size, family.config.context_length - 12)
    small = {"max_step_tokens": 64, "block_size": 16}
    expected = answers(load_model(family, "fp32"), token_bytes, requests, **small)
    possible = [ranks for ranks in (2, 3, 4) if ranks in shard_counts(family.config)]
    assert possible
    for ranks in possible:
        with thread_ranks(family, ranks) as rank_zero:
            found = answers(rank_zero.load("fp32"), token_bytes, requests, **small)
        assert_same(found, expected, TOLERANCE)


def scores_after_prompts(directory, model):
    """float32[n, V]: after prompts of many lengths."""
    encoded = directory.tokenizer().encode_batch(list(SENTENCES))
    prompts = [ids[: 1 + 11 * i] for i, ids in enumerate(encoded)]
    return first_logits(model, directory.tokenizer().token_bytes, prompts)


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "int8", "fp8"])
def test_scores_are_as_exact_as_the_precision(some_family, dtype):
    exact = scores_after_prompts(some_family, load_model(some_family, "fp32"))
    with thread_ranks(some_family, 2) as rank_zero:
        found = scores_after_prompts(some_family, rank_zero.load(dtype))
    whole = scores_after_prompts(some_family, load_model(some_family, dtype))
    if dtype in EXACT:
        largest = float(whole.abs().max())
        torch.testing.assert_close(found, whole, rtol=0, atol=EXACT[dtype] * largest)
    else:
        assert rms(found - exact) <= NO_WORSE * rms(whole - exact)


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())
