"""Whole requests through the engine on the CUDA kernels, against the CPU's and transformers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nightjar.checkpoints.adapters import adapted_shapes
from nightjar.gpu_worker.engine import BeamSearch, Engine, EngineConfig, RankRequest
from nightjar.gpu_worker.models import load_model
from nightjar.kernels.cuda import launch
from tests.engine_cuda.requests import CACHE, prompt, tokens
from tests.engines import assert_nothing_held, generate, run
from tests.engines import drain as drained


def greedy_by_transformers(path, ids, count):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("name", ["gpt", "family"])
def test_greedy_texts_are_those_of_transformers(device, name, request):
    """Prompts shorter than a cache block, longer, and of several: all in one batch."""
    directory = request.getfixturevalue(name)
    model = load_model(directory, "fp32", device)
    prompts = [prompt(3, 1), prompt(33, 2), prompt(70, 3)]
    requests = [generate(i, ids, max_tokens=5) for i, ids in enumerate(prompts)]
    found = tokens(run(model, directory.tokenizer().token_bytes, requests, **CACHE))
    wanted = {i: [greedy_by_transformers(directory.path, p, 5)] for i, p in enumerate(prompts)}
    assert found == wanted


@pytest.mark.parametrize("dtype", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_16_bits_stay_near_32(device, gpt, by_cpu, dtype):
    """The log-probability of what FP32 writes: the same to the precision of the storage."""
    text_bytes = gpt.tokenizer().token_bytes
    model = load_model(gpt, dtype, device)
    asked = RankRequest(1, prompt(40), [prompt(5, seed) for seed in range(3)])
    (got,) = run(model, text_bytes, [asked], **CACHE).values()
    (wanted,) = by_cpu([asked]).values()
    np.testing.assert_allclose(got.mean_nll, wanted.mean_nll, rtol=0.03)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gpt", "fp16"),
        ("family", "bf16"),
        pytest.param("gpt", "bf16", marks=pytest.mark.slow),
        pytest.param("family", "fp16", marks=pytest.mark.slow),
    ],
)
def test_few_texts_of_16_bits_stay_near_32(device, name, dtype, request):
    """Products of few rows have the norm, the activation and the addition in them."""
    directory = request.getfixturevalue(name)
    text_bytes = directory.tokenizer().token_bytes
    asked = [RankRequest(1, prompt(5), [prompt(3, seed) for seed in range(2)])]
    with launch.using(None):
        (wanted,) = run(load_model(directory, "fp32"), text_bytes, asked).values()
    (got,) = run(load_model(directory, dtype, device), text_bytes, asked, **CACHE).values()
    np.testing.assert_allclose(got.mean_nll, wanted.mean_nll, rtol=0.01)


def test_rankings_have_the_scores_of_the_cpu(on_device, by_cpu, texts):
    """Documents of several lengths, beginnings that they share, two queries in one step."""
    shared = prompt(20, 9)
    requests = [
        RankRequest(1, prompt(40, 1), [prompt(n, n) for n in (1, 2, 7, 31)]),
        RankRequest(2, prompt(5, 2), [shared + prompt(4, n) for n in range(4)]),
        RankRequest(3, prompt(40, 1), [prompt(6, n) for n in range(9)], top_n=2),
    ]
    got = run(on_device, texts, requests, **CACHE)
    wanted = by_cpu(requests)
    for number, result in wanted.items():
        missing = [score is None for score in result.mean_nll]
        assert [score is None for score in got[number].mean_nll] == missing
        numbers = [[s for s in r.mean_nll if s is not None] for r in (got[number], result)]
        np.testing.assert_allclose(*numbers, rtol=1e-5)


def test_requests_that_the_host_has_a_part_in(on_device, by_cpu, texts):
    """Log-probabilities, beams, bias, bad words, top_a, several samples, prompt vectors."""
    requests = [
        generate(1, prompt(9, 1), max_tokens=4, logprobs=3),
        generate(2, prompt(9, 2), max_tokens=4, beams=BeamSearch(2)),
        generate(3, prompt(9, 3), max_tokens=4, logit_bias={7: 9.0}, bad_words=((7,),)),
        generate(4, prompt(9, 4), max_tokens=4, n=3, temperature=1.0, seed=5),
        generate(5, [320, 321, 5], max_tokens=4, vectors="task"),
        generate(6, prompt(9, 6), max_tokens=4, min_tokens=3, ignore_eos=False),
        generate(7, prompt(9, 7), max_tokens=4, temperature=0.1, top_a=0.3, seed=8),
    ]
    vectors = {"task": torch.randn(2, 128, generator=torch.Generator().manual_seed(1))}
    got = run(on_device, texts, requests, vectors, **CACHE)
    wanted = by_cpu(requests, vectors)
    assert tokens(got) == tokens(wanted)
    for mine, other in zip(got[1].outputs[0].logprobs, wanted[1].outputs[0].logprobs, strict=True):
        assert [token for token, _ in mine.top] == [token for token, _ in other.top]
        assert mine.chosen == pytest.approx(other.chosen, abs=1e-5)


def test_adapters_beside_requests_without_one(on_device, by_cpu, texts):
    """Texts and rankings; the products of low rank are torch's."""
    drawn = torch.Generator().manual_seed(2)
    named = {}
    every = adapted_shapes(on_device.config)
    for key, projections, strength in (("all", every, 0.2), ("up", ("up",), 2.0)):
        named[key] = {}
        for projection in projections:
            inputs, outputs = every[projection]
            named[key][f"0.{projection}.down"] = torch.randn(3, inputs, generator=drawn) * 0.1
            named[key][f"0.{projection}.up"] = torch.randn(outputs, 3, generator=drawn) * strength
    requests = [
        replace(generate(number, prompt(9, 1), max_tokens=5), adapter=adapter)
        for number, adapter in enumerate((None, "all", "up", "all"))
    ]
    requests.append(RankRequest(9, prompt(9, 1), [prompt(4, 2), prompt(1, 3)], adapter="all"))
    got, wanted = run(on_device, texts, requests, named, **CACHE), by_cpu(requests, named)
    for number in range(4):
        assert got[number].token_ids == wanted[number].token_ids
    np.testing.assert_allclose(got[9].mean_nll, wanted[9].mean_nll, rtol=1e-5)
    assert len({tuple(got[number].token_ids) for number in range(3)}) == 3


def test_a_prefix_that_is_known_is_read_and_not_computed(on_device, texts):
    engine = Engine(on_device, texts, EngineConfig(**CACHE))
    ids = prompt(70, 5)
    first = drained(engine, generate(1, ids, max_tokens=3))[1]
    assert len(engine.pool.known) == 2
    again = drained(engine, generate(2, ids, max_tokens=3))[2]
    assert again.token_ids == first.token_ids
    assert_nothing_held(engine)


def test_of_a_block_in_part_the_same_the_beginning_is_copied(on_device, texts, monkeypatch):
    """Rows behind a copied beginning see it as one that was computed: 40 of 43 tokens alike."""
    engine, first = Engine(on_device, texts, EngineConfig(**CACHE)), prompt(60, 5)
    drained(engine, generate(1, first, max_tokens=1))
    other = generate(2, first[:43] + prompt(9, 6), max_tokens=3, logprobs=1)
    cold = run(on_device, texts, [other], **CACHE)[2]
    computed, forward = [], on_device.forward

    def counting(batch, cache):
        computed.append(int((batch.write_blocks >= 0).sum()))  # other rows fill the shape up
        return forward(batch, cache)

    monkeypatch.setattr(on_device, "forward", counting)
    warm = drained(engine, other)[2]
    assert computed[0] == 43 + 9 - 40
    assert warm.token_ids == cold.token_ids
    chosen = ([said.chosen for said in r.outputs[0].logprobs] for r in (warm, cold))
    np.testing.assert_allclose(*chosen, rtol=1e-5)
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", ["text", "ranking"])
def test_who_begins_as_a_prompt_that_is_not_finite_is_answered(device, family, kind):
    """The prompt takes three steps, so its first blocks are found by another before its scores are
    seen; and attention carries the NaN of its 41st token to the rows before it."""
    model, texts = load_model(family, "fp32", device), family.tokenizer().token_bytes
    shared, other = prompt(40), prompt(9, 1)
    spoilt = generate(1, [*shared, 319, *prompt(40, 2)], max_tokens=3)
    good = generate(2, shared + other, max_tokens=3)
    if kind == "ranking":
        good = RankRequest(2, shared + other, [prompt(5, 3)])
    limits = CACHE | {"max_step_tokens": 32, "block_size": 8}
    wanted = run(model, texts, [good], **limits)[2]
    with torch.inference_mode():
        model.weights.tokens[319] = float("nan")
    engine = Engine(model, texts, EngineConfig(**limits, banned_token_ids=(319,)))
    results = drained(engine, spoilt, good)
    assert results[1].code == "not_finite"
    if kind == "ranking":
        np.testing.assert_allclose(results[2].mean_nll, wanted.mean_nll, rtol=1e-5)
    else:
        assert results[2] == wanted
    assert_nothing_held(engine)
