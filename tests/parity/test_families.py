"""Random models of every family against transformers."""

import pytest
import torch

from nightjar.gpu_worker.engine import GenerateRequest, RankRequest, SamplingParams
from tests.families import CASES, save_family
from tests.models import SENTENCES, Gpt2Shape, save_gpt2
from tests.parity.oracle import Pair

GPT2_SHAPES = {
    "gpt2": Gpt2Shape(),
    "gpt2, odd heads": Gpt2Shape(n_layer=3, n_embd=33, n_head=3, n_inner=77, vocab_size=521),
    "gpt2, one head": Gpt2Shape(n_layer=1, n_embd=50, n_head=1, activation="gelu"),
    "gpt2, untied, half": Gpt2Shape(tied=False, prefix=False, dtype=torch.float16),
    "gpt2, bfloat16 file": Gpt2Shape(
        n_embd=48, dtype=torch.bfloat16, activation="relu", block_scale=9.0
    ),
    "gpt2, scaled layers": Gpt2Shape(n_layer=4, scale_by_layer=True, activation="gelu_fast"),
}


@pytest.fixture(scope="module", params=[*GPT2_SHAPES, *CASES])
def path(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("family") / "model"
    if request.param in CASES:
        return save_family(directory, CASES[request.param], seed=5)
    return save_gpt2(directory, GPT2_SHAPES[request.param], seed=5)


@pytest.fixture(scope="module")
def pair(path):
    return Pair(path)


def prompts(pair, longest=60):
    encoded = pair.tokenizer.encode_batch(SENTENCES)
    return [ids[: 1 + (17 * i) % longest] for i, ids in enumerate(encoded)]


def test_greedy_tokens_and_logits(pair):
    params = SamplingParams(10, ignore_eos=True)
    given = prompts(pair)
    alone = [pair.check_greedy(prompt, 10) for prompt in given]
    together = pair.run([GenerateRequest(i, p, params) for i, p in enumerate(given)])
    assert [together[i].token_ids for i in range(len(given))] == alone
    # The output must depend on the context, or equal tokens would show nothing.
    assert len({tuple(tokens) for tokens in alone}) > len(alone) // 2


def test_the_last_position_of_the_context(pair):
    context = pair.model.config.context_length
    prompt = pair.tokenizer.encode(SENTENCES[0] * 3)[: context - 5]
    pair.check_greedy(prompt, context - len(prompt))


def test_rank_scores(pair):
    query, *documents = prompts(pair, 35)
    documents = [*documents, documents[0][:1], query * 5]
    queries = [prompts(pair, 35)[4], query]
    requests = [RankRequest(i, q, documents) for i, q in enumerate(queries)]
    results = pair.run(requests)
    for request in requests:
        expected = [pair.nll(request.query_ids, document) for document in documents]
        assert results[request.request_id].mean_nll == pytest.approx(expected, abs=1e-4)


def test_results_do_not_depend_on_the_batch(pair):
    """To the last bit: a request alone and among requests of other lengths."""
    query, *documents = prompts(pair, 35)
    rank = RankRequest(0, query, documents)
    company = [
        GenerateRequest(10 + i, prompt, SamplingParams(4 + i, ignore_eos=True))
        for i, prompt in enumerate(prompts(pair))
    ]
    alone = pair.run([rank])[0].mean_nll
    others = [*company, RankRequest(1, documents[2], [query * 3])]
    assert pair.run([*others, rank])[0].mean_nll == alone
    single = [pair.run([RankRequest(0, query, [document])])[0] for document in documents]
    assert [result.mean_nll[0] for result in single] == alone
    _, expected = pair.greedy(company[3].token_ids, 4)
    _, found = pair.run_written(company)
    assert all((found == row).all(1).any() for row in expected)


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


def test_bf16_is_close_to_fp32(pair, path):
    rounded = Pair(path, "bf16")
    prompt = prompts(pair)[3]
    tokens, found = rounded.greedy(prompt, 4)
    expected = pair.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
    assert float((found - expected).abs().max() / expected.abs().max()) < 0.05
