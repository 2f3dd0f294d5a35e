"""Keys and values in FP8 through the engine on the CUDA kernels."""

import pytest

from nightjar.gpu_worker.engine import RankRequest
from nightjar.gpu_worker.models import KVTensors, load_model
from nightjar.kernels.cuda import launch
from tests.engine_cuda.requests import CACHE, engine_of, prompt, tokens
from tests.engines import assert_nothing_held, drain, generate, load_always, run


def requests():
    """Prompts shorter than a block, of several, and with a common beginning; samples, a ranking."""
    shared = prompt(40, 9)
    return [
        generate(0, prompt(3, 1), max_tokens=5),
        generate(1, prompt(70, 2), max_tokens=5, logprobs=1),
        generate(2, shared + prompt(3, 3), max_tokens=5),
        generate(3, shared + prompt(9, 4), max_tokens=5, n=2, temperature=1.0, seed=3),
        RankRequest(4, shared, [prompt(n, n) for n in (1, 5, 9)]),
    ]


@pytest.mark.parametrize("name", ["gpt", "family"])
def test_texts_and_scores_are_those_of_the_cpu(device, name, request):
    """Heads that share nothing, and grouped heads with norms and rotations."""
    directory = request.getfixturevalue(name)
    texts = directory.tokenizer().token_bytes
    with launch.using(None):
        wanted = run(load_model(directory, "fp32"), texts, requests(), fp8_cache=True)
    model = load_model(directory, "fp32", device)
    got = run(model, texts, requests(), fp8_cache=True, **CACHE)
    assert got[4].mean_nll == pytest.approx(wanted[4].mean_nll, rel=1e-4)
    del got[4], wanted[4]
    assert tokens(got) == tokens(wanted)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_windows_and_fused_heads_change_no_token(device, family, dtype):
    """Steps that the host reads one by one, and several without it."""
    texts = family.tokenizer().token_bytes
    model = load_model(family, dtype, device)
    asked = [generate(i, prompt(9 + 30 * i, i), max_tokens=6) for i in range(3)]
    found = []
    for steps in (1, 4):
        engine = engine_of(model, texts, fp8_cache=True, window_steps=steps)
        found.append(tokens(drain(engine, *asked)))
        assert engine.windows is not None
        assert engine.cache.scales is not None
        assert_nothing_held(engine)
    assert found[0] == found[1]


def test_blocks_come_back_from_the_hosts_memory_with_their_scales(device, family):
    model, texts = load_model(family, "fp32", device), family.tokenizer().token_bytes
    block = KVTensors.block_bytes(model.config, 32, model.cache_dtype, fp8=True)
    turns = [
        generate(3 * turn + seed, prompt(40 + 30 * turn, seed), max_tokens=5)
        for turn in range(2)
        for seed in range(3)
    ]
    plain = engine_of(model, texts, fp8_cache=True)
    memory = {"kv_cache_bytes": 3 * block, "host_cache_bytes": 9 * block}
    tight = engine_of(model, texts, fp8_cache=True, **memory)
    load_always(tight)
    for turn in turns:
        assert drain(tight, turn) == drain(plain, turn)
    assert len(tight.tier) == 5
    assert_nothing_held(tight)
