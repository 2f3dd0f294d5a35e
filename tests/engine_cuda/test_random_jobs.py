"""Random jobs under random limits: every request has the answer that it has alone on the CPU."""

import random
from dataclasses import replace

import numpy as np
import pytest

from nightjar.gpu_worker.engine import BeamSearch, GenerateResult, RankRequest, RequestFailed
from nightjar.gpu_worker.engine.kv_cache import BlockPool
from nightjar.gpu_worker.engine.validation import blocks_of_sequences
from nightjar.gpu_worker.models import KVTensors, load_model
from nightjar.kernels.cuda import launch
from tests.engine_cuda.requests import engine_of, prompt
from tests.engine_cuda.tape import Tapes
from tests.engines import assert_nothing_held, generate, load_always, run
from tests.kernels_cuda.devices import run_on_host

BANNED = (1,)
EOS = (0, 17)
LAST_EVENT = 30
"""Steps of the engine within which requests come and are cancelled."""
SEEDS = [
    seed if seed % 6 == 0 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(12)
]
"""Two of them in `make test`, all in `make test-all`."""


def some_prompt(rng):
    """Most begin like others, to somewhere within a cache block."""
    beginning = prompt(80, rng.randrange(2))[: rng.choice((0, 8, 31, 32, 45, 70))]
    return beginning + prompt(rng.choice((1, 2, 9, 20)), rng.randrange(1000))


def some_text(rng, number):
    """What the device continues by itself, and now and then what needs the host."""
    params = {"max_tokens": rng.choice((1, 2, 5, 9, 17)), "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.6:
        params |= {"temperature": rng.choice((0.4, 1.2)), "seed": rng.choice((3, -5, 2**63))}
        params |= {"top_k": rng.choice((0, 0, 20)), "top_p": rng.choice((1.0, 0.8))}
        params |= {"n": rng.choice((1, 1, 3)), "min_p": rng.choice((0.0, 0.05))}
    if rng.random() < 0.3:
        params |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.5}
    if rng.random() < 0.5:
        params["stop"] = tuple(rng.randbytes(1) for _ in range(6))
        params["min_tokens"] = rng.choice((0, 0, 1))
    if rng.random() < 0.1:
        params["logprobs"] = 1
    elif rng.random() < 0.1:
        params = {"max_tokens": 6, "beams": BeamSearch(2), "ignore_eos": False}
    return generate(number, some_prompt(rng), **params)


def some_request(rng, number):
    """A text, a ranking, or what is refused."""
    kind = rng.random()
    if kind < 0.75:
        return some_text(rng, number)
    if kind < 0.8:
        return generate(number, prompt(180), max_tokens=40)
    shared = prompt(rng.choice((0, 30)), 7)
    documents = [
        shared + prompt(rng.choice((1, 2, 8, 20)), i) for i in range(rng.choice((1, 4, 9)))
    ]
    return RankRequest(number, some_prompt(rng), documents, top_n=rng.choice((None, 1)))


def stopped(rng, request, text):
    """The same text, to end by a piece of itself: bytes of a token's end and the next one's begin
    as likely as not."""
    begin = rng.randrange(max(1, len(text)))
    stop = text[begin : begin + rng.choice((2, 3, 5))]
    sampling = replace(request.sampling, stop=(*request.sampling.stop, stop or b"z"))
    return replace(request, sampling=sampling)


def blocks_needed(request, size):
    """Of the cache, to be computed at all."""
    pool = BlockPool(1, size)
    if isinstance(request, RankRequest):
        return pool.blocks_for(len(request.query_ids))
    return blocks_of_sequences(pool, len(request.token_ids), request.sampling)


def some_limits(rng, requests, block_bytes):
    """Settings of an engine that can compute the requests, some of them only just."""
    size = rng.choice((1, 8, 32))
    blocks = max(blocks_needed(request, size) for request in requests) + rng.choice((0, 0, 3, 40))
    return {
        "block_size": size,
        "kv_cache_bytes": blocks * block_bytes * size,
        "host_cache_bytes": rng.choice((0, 20)) * block_bytes * size,
        "max_running": rng.choice((2, 3, 8, 9)),
        "max_step_tokens": rng.choice((5, 33, 2048)),
        "window_steps": rng.choice((1, 2, 5, 16)),
        "banned_token_ids": BANNED,
        "eos_token_ids": EOS,
    }


def driven(rng, engine, requests, cancelled):
    """The results, one of each request; they come one after the other, and sometimes what was
    known of prefixes is forgotten meanwhile."""
    comes = {request.request_id: rng.choice((0, rng.randrange(LAST_EVENT))) for request in requests}
    leaves = {number: rng.randrange(LAST_EVENT) for number in cancelled}
    forgets = rng.choice((None, LAST_EVENT // 2))
    results = {}
    for step in range(3000):
        for request in requests:
            if comes[request.request_id] == step:
                engine.submit(request)
            if leaves.get(request.request_id) == step:
                engine.cancel(request.request_id)
        if step == forgets:
            engine.reset_prefix_cache()
        for result in engine.step():
            assert result.request_id not in results
            results[result.request_id] = result
        if step > LAST_EVENT and not engine.has_work:
            return results
    raise AssertionError("the engine does not come to an end")


def assert_same(request, got, wanted):
    """Texts to the last byte; scores and log-probabilities as near as two orders of adding are.

    Of the documents that are not asked for, any may have been scored.
    """
    if isinstance(wanted, RequestFailed):
        assert got == wanted
        return
    if isinstance(request, RankRequest):
        assert request.top_n is not None or None not in got.mean_nll
        scores = [np.array(one.mean_nll, dtype=float) for one in (got, wanted)]
        assert np.nanargmin(scores[0]) == np.nanargmin(scores[1])
        in_both = np.isfinite(scores[0] + scores[1])
        np.testing.assert_allclose(scores[0][in_both], scores[1][in_both], rtol=1e-5)
        return
    for mine, other in zip(got.outputs, wanted.outputs, strict=True):
        assert mine.token_ids == other.token_ids
        assert (mine.text, mine.finish_reason) == (other.text, other.finish_reason)
        chosen = ([said.chosen for said in one.logprobs or ()] for one in (mine, other))
        np.testing.assert_allclose(*chosen, atol=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_job_has_the_answers_of_its_requests_alone(device, gpt, texts, seed):
    """Few places, rows and blocks, windows of any length, prefixes that leave the cache and come
    back from the host's memory, requests that come and go meanwhile. Some engines play
    recorded steps back."""
    rng = random.Random(seed)
    requests = [some_request(rng, number) for number in range(rng.choice((3, 8, 14)))]
    ends = {"banned_token_ids": BANNED, "eos_token_ids": EOS}
    wanted = {}
    with launch.using(None):
        by_cpu = load_model(gpt, "fp32")
        for number, request in enumerate(requests):
            wanted[number] = run(by_cpu, texts, [request], **ends)[number]
            if isinstance(wanted[number], GenerateResult) and rng.random() < 0.5:
                requests[number] = stopped(rng, request, wanted[number].text)
                wanted[number] = run(by_cpu, texts, [requests[number]], **ends)[number]
    possible = [r for r in requests if not isinstance(wanted[r.request_id], RequestFailed)]
    model = load_model(gpt, "fp32", device)
    one_position = KVTensors.block_bytes(model.config, 1, model.cache_dtype)
    engine = engine_of(model, texts, **some_limits(rng, possible, one_position))
    if seed % 4 == 2 and device == "cpu":
        engine.windows.steps.record = Tapes(run_on_host)
    if engine.tier is not None:
        load_always(engine)
    cancelled = {number for number in wanted if rng.random() < 0.1}
    results = driven(rng, engine, requests, cancelled)
    assert results.keys() == wanted.keys()
    for request in requests:
        number = request.request_id
        if number not in cancelled or getattr(results[number], "code", None) != "cancelled":
            assert_same(request, results[number], wanted[number])
    assert engine.windows is not None
    assert_nothing_held(engine)
