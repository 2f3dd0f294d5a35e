"""Random GPT-2 models of several shapes against transformers."""

import pytest
import torch

from nightjar.gpu_worker.engine import GenerateRequest, RankRequest, SamplingParams
from tests.models import SENTENCES, SMALL, Gpt2Shape, save_gpt2
from tests.parity.oracle import Pair

SHAPES = {
    "plain": Gpt2Shape(),
    "odd heads": Gpt2Shape(n_layer=3, n_embd=33, n_head=3, n_inner=77, vocab_size=521),
    "one head": Gpt2Shape(n_layer=1, n_embd=50, n_head=1, activation="gelu"),
    "untied, half": Gpt2Shape(tied=False, prefix=False, dtype=torch.float16),
    "bfloat16 file": Gpt2Shape(n_embd=48, dtype=torch.bfloat16, activation="relu", block_scale=9.0),
    "scaled layers": Gpt2Shape(n_layer=4, scale_by_layer=True, activation="gelu_pytorch_tanh"),
}


@pytest.fixture(scope="module", params=SHAPES)
def pair(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt2") / "model"
    return Pair(save_gpt2(path, SHAPES[request.param], seed=5))


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


def test_greedy_tokens_and_logits(pair):
    alone = [pair.check_greedy(prompt, 20) for prompt in prompts(pair)]
    assert generate_all(pair, prompts(pair), 20) == alone
    # The output must depend on the context, or equal tokens would show nothing.
    assert len({tuple(tokens) for tokens in alone}) > len(alone) // 2


def test_the_last_position_of_the_context(pair):
    pair.check_greedy(pair.tokenizer.encode(SENTENCES[0] * 3)[:100], 28)


def test_rank_scores(pair):
    query, *documents = prompts(pair)
    documents = [*documents, documents[0][:1], query * 5]
    queries = [prompts(pair)[4], query]
    requests = [RankRequest(i, q, documents) for i, q in enumerate(queries)]
    results = pair.run(requests)
    for request in requests:
        expected = [pair.nll(request.query_ids, document) for document in documents]
        assert results[request.request_id].mean_nll == pytest.approx(expected, abs=1e-4)


def test_prompt_vectors_are_inputs_embeds(pair):
    generator = torch.Generator().manual_seed(4)
    width = pair.model.config.hidden_size
    vectors = {key: torch.randn(4, width, generator=generator) * 0.3 for key in "ab"}
    first = pair.vocab_size
    prompt = [first, first + 1, first + 2, first + 3, *prompts(pair)[2][:5], first, 9]
    documents = [prompts(pair)[3][:6], [8, first + 2, 7]]
    params = SamplingParams(8, ignore_eos=True)
    requests = []
    for i, key in enumerate("ab"):
        requests.append(GenerateRequest(i, prompt, params, key))
        requests.append(RankRequest(10 + i, prompt, documents, key))
    results = pair.run(requests, vectors)
    for i, key in enumerate("ab"):
        tokens = results[i].token_ids
        expected = pair.logits([*prompt, *tokens], vectors[key])[len(prompt) - 1 : -1]
        assert tokens == expected.argmax(-1).tolist()
        scores = [pair.nll(prompt, document, vectors[key]) for document in documents]
        assert results[10 + i].mean_nll == pytest.approx(scores, abs=1e-4)
    assert results[0].token_ids != results[1].token_ids


def test_gpt2_small_shape(small):
    chosen = prompts(small)[2:6]
    alone = [small.check_greedy(prompt, 8) for prompt in chosen]
    assert generate_all(small, chosen, 8) == alone
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    query, *documents = chosen
    expected = [small.nll(query, document) for document in documents]
    scores = small.run([RankRequest(0, query, documents)])[0].mean_nll
    assert scores == pytest.approx(expected, abs=1e-4)


def test_bf16_is_close_to_fp32(tmp_path):
    path = save_gpt2(tmp_path / "model", Gpt2Shape(n_layer=4, n_embd=64), seed=2)
    exact, rounded = Pair(path), Pair(path, "bf16")
    query, *documents = prompts(exact)
    request = RankRequest(0, query, documents)
    scores = exact.run([request])[0].mean_nll
    assert rounded.run([request])[0].mean_nll == pytest.approx(scores, abs=0.03)
    for prompt in prompts(exact):
        tokens, found = rounded.greedy(prompt, 6)
        expected = exact.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        assert float((found - expected).abs().max() / expected.abs().max()) < 0.03


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
