"""GPT-2-small's shape, and what sampling draws, against transformers."""

import pytest
import torch

from nightjar.gpu_worker.engine import GenerateRequest, RankRequest, SamplingParams
from tests.models import SENTENCES, SMALL, Gpt2Shape, save_gpt2
from tests.parity.oracle import Pair


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return Pair(save_gpt2(tmp_path_factory.mktemp("small") / "model", SMALL, seed=1))


def prompts(pair, longest=60):
    encoded = pair.tokenizer.encode_batch(SENTENCES)
    return [ids[: 1 + (17 * i) % longest] for i, ids in enumerate(encoded)]


def generate_all(pair, prompts, max_tokens):
    params = SamplingParams(max_tokens, ignore_eos=True)
    results = pair.run([GenerateRequest(i, p, params) for i, p in enumerate(prompts)])
    return [results[i].token_ids for i in range(len(prompts))]


@pytest.mark.slow
def test_gpt2_small_shape(small):
    chosen = prompts(small)[2:6]
    alone = [small.check_greedy(prompt, 8) for prompt in chosen]
    assert generate_all(small, chosen, 8) == alone
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    query, *documents = chosen
    expected = [small.nll(query, document) for document in documents]
    scores = small.run([RankRequest(0, query, documents)])[0].mean_nll
    assert scores == pytest.approx(expected, abs=1e-4)


def test_samples_follow_transformers_softmax(tmp_path):
    pair = Pair(save_gpt2(tmp_path / "model", Gpt2Shape(vocab_size=300), seed=3))
    prompt, n, temperature, top_k = [5, 9, 40], 3000, 0.5, 30
    requests = [
        GenerateRequest(seed, prompt, SamplingParams(1, temperature, top_k, seed=seed))
        for seed in range(n)
    ]
    results = pair.run(requests)
    scores = pair.logits(prompt)[-1].double() / temperature
    kept = scores.topk(top_k)
    expected = torch.zeros(300, dtype=torch.float64)
    expected[kept.indices] = kept.values.softmax(-1) * n
    counts = torch.bincount(
        torch.tensor([result.token_ids[0] for result in results.values()]), minlength=300
    )
    assert (counts[expected == 0] == 0).all()
    usable = expected >= 5
    chi_square = float(((counts - expected)[usable] ** 2 / expected[usable]).sum())
    degrees = int(usable.sum()) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5
