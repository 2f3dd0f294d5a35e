"""Prefixes computed once: the same answers to the last bit, with less work."""

import pytest
import torch
from hypothesis import given, settings

from nightjar.gpu_worker.engine import (
    Engine,
    EngineConfig,
    GenerateRequest,
    RankRequest,
    SamplingParams,
)
from tests.engines import VOCAB, block_bytes, drain, generate, ids
from tests.traffic import traffic

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(any_model):
    return any_model


def test_a_conversation_computes_only_its_new_turn(model, token_bytes, rows):
    engine = Engine(model, token_bytes, EngineConfig())
    first = ids(70)
    drain(engine, generate(0, first))
    del rows[:]
    longer = first + ids(20, 1)
    warm = drain(engine, generate(1, longer))
    # 64 of 90 tokens stand in whole blocks of the first turn.
    assert rows[0] == 26
    cold = drain(Engine(model, token_bytes, EngineConfig()), generate(1, longer))
    assert warm == cold


def test_of_a_block_in_part_the_same_the_beginning_is_copied(model, token_bytes, rows):
    engine = Engine(model, token_bytes, EngineConfig())
    first = ids(90)
    drain(engine, generate(0, first))
    del rows[:]
    for number, (same, computed) in enumerate([(85, 25), (71, 41), (64, 41), (63, 49)], 1):
        other = first[:same] + ids(105 - same, number)
        warm = drain(engine, generate(number, other))
        assert rows[0] == computed, same
        assert warm == drain(Engine(model, token_bytes, EngineConfig()), generate(number, other))
        del rows[:]


def test_what_no_finite_scores_vouch_for_is_not_copied(model, token_bytes):
    """Of the first block of a prompt under way the beginning is fine and the rest is not."""
    engine = Engine(model, token_bytes, EngineConfig(max_step_tokens=32))
    first = ids(70)
    engine.submit(generate(0, first))
    engine.step()
    (job,) = engine.live.values()
    for cached in (engine.cache.keys, engine.cache.values):
        cached[:, job.prefix.held.blocks[0], :, 20] = float("nan")
    other = generate(1, [*first[:16], 9, 10])
    found = drain(engine, other)
    assert found[0].code == "not_finite"
    assert found[1] == drain(Engine(model, token_bytes, EngineConfig()), other)[1]


def test_a_prompt_that_is_known_to_its_end_computes_its_last_grain(model, token_bytes, rows):
    engine = Engine(model, token_bytes, EngineConfig())
    first = drain(engine, generate(0, ids(96)))
    del rows[:]
    assert drain(engine, generate(1, ids(96)))[1].outputs == first[0].outputs
    assert rows[0] == 8


def test_a_reset_makes_the_cache_as_good_as_new(model, token_bytes, rows):
    engine = Engine(model, token_bytes, EngineConfig())
    first = drain(engine, generate(0, ids(70)))
    engine.reset_prefix_cache()
    del rows[:]
    assert drain(engine, generate(0, ids(70))) == first
    assert rows[0] == 70


def test_requests_that_come_together_share_a_system_prompt(model, token_bytes, rows):
    system = ids(64)
    requests = [generate(i, system + ids(5, i), max_tokens=1) for i in range(1, 9)]
    drain(Engine(model, token_bytes, EngineConfig()), *requests)
    # The first computes the system prompt, the others wait one step for it.
    assert rows == [69, 7 * 5]


def test_the_same_query_in_many_rankings_is_computed_once(model, token_bytes, rows):
    query = ids(65)
    requests = [RankRequest(i, query, [ids(5, i)]) for i in range(6)]
    drain(Engine(model, token_bytes, EngineConfig()), *requests)
    assert sum(rows) == 65 + 4 + 5 * (1 + 4)


def test_rankings_and_texts_share_prefixes(model, token_bytes, rows):
    prompt = ids(40)
    engine = Engine(model, token_bytes, EngineConfig())
    drain(engine, generate(0, prompt, max_tokens=1))
    del rows[:]
    drain(engine, RankRequest(1, prompt, [[5]]))
    assert rows == [8]


def test_vectors_tell_equal_prompts_apart(model, token_bytes):
    engine = Engine(model, token_bytes, EngineConfig())
    generator = torch.Generator().manual_seed(0)
    for key in "ab":
        engine.register_prompt_vectors(key, torch.randn(1, 32, generator=generator))
    prompt = [VOCAB, *ids(40)]
    requests = [
        GenerateRequest(i, prompt, SamplingParams(8, ignore_eos=True), key)
        for i, key in enumerate("ab")
    ]
    one_by_one = [drain(engine, request)[request.request_id] for request in requests]
    assert one_by_one[0].token_ids != one_by_one[1].token_ids
    alone = Engine(model, token_bytes, EngineConfig())
    alone.register_prompt_vectors("x", torch.zeros(3, 32))
    generator = torch.Generator().manual_seed(0)
    for key in "ab":
        alone.register_prompt_vectors(key, torch.randn(1, 32, generator=generator))
    assert drain(alone, requests[1])[1] == one_by_one[1]


def test_samples_share_the_prompt_and_differ(model, token_bytes, rows):
    prompt = ids(45)
    request = generate(0, prompt, max_tokens=8, n=5, temperature=1.5, seed=3)
    engine = Engine(model, token_bytes, EngineConfig())
    (result,) = drain(engine, request).values()
    assert sum(rows) == 45 + 5 * 7
    assert len({tuple(output.token_ids) for output in result.outputs}) == 5
    # Few places: the last samples start when the first have ended.
    narrow = Engine(model, token_bytes, EngineConfig(max_running=2))
    assert drain(narrow, request)[0] == result


def test_samples_that_can_never_fit_are_refused_with_the_numbers(model, token_bytes):
    block = block_bytes(model)
    engine = Engine(model, token_bytes, EngineConfig(kv_cache_bytes=10 * block))
    request = generate(0, ids(45), max_tokens=8, n=10, temperature=1.0)
    (result,) = drain(engine, request).values()
    assert result.code == "cache_exceeded"
    assert "10 times: needs 12 cache blocks" in result.message


def test_a_full_cache_forgets_and_computes_again(model, token_bytes):
    block = block_bytes(model)
    tight = Engine(model, token_bytes, EngineConfig(kv_cache_bytes=4 * block))
    prompts = [ids(70, i % 3) for i in range(9)]
    requests = [generate(i, prompt) for i, prompt in enumerate(prompts)]
    roomy = drain(Engine(model, token_bytes, EngineConfig()), *requests)
    assert drain(tight, *requests) == roomy


@settings(max_examples=20, deadline=None)
@given(traffic=traffic())
def test_no_bit_depends_on_what_was_computed_before(model, token_bytes, traffic):
    """Not on the cache, on how prompts were cut, on evictions, on the order or the company."""
    waves, config, blocks = traffic
    block = block_bytes(model)
    engine = Engine(model, token_bytes, EngineConfig(kv_cache_bytes=blocks * block, **config))
    for wave in waves:
        results = drain(engine, *wave)
        for request in wave:
            alone = drain(Engine(model, token_bytes, EngineConfig()), request)
            assert results[request.request_id] == alone[request.request_id]
