"""The engine as its users see it: who finishes, how, and who is not touched."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nightjar.gpu_worker.engine import (
    Engine,
    EngineConfig,
    GenerateResult,
    RankRequest,
    RankResult,
    RequestFailed,
)
from nightjar.gpu_worker.models import load_model
from tests.engines import VOCAB, drain, generate, ids, one, run

pytestmark = pytest.mark.usefixtures("one_thread")


def test_length_ends_a_text(model, token_bytes):
    result = one(model, token_bytes, generate(max_tokens=4))
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 4
    assert result.text == b"".join(token_bytes[i] for i in result.token_ids)
    assert result.prompt_tokens == 5


def test_a_stop_ends_a_text_where_it_begins(model, token_bytes):
    free = one(model, token_bytes, generate(max_tokens=12))
    pieces = [token_bytes[i] for i in free.token_ids]
    whole = b"".join(pieces)
    stop = whole[3:6]
    result = one(model, token_bytes, generate(max_tokens=12, stop=(stop,)))
    assert result.finish_reason == "stop"
    assert result.text == whole[: whole.index(stop)]
    # The row ends with the token that completes the stop, and not before.
    done = b"".join(token_bytes[i] for i in result.token_ids)
    assert stop in done
    assert stop not in b"".join(token_bytes[i] for i in result.token_ids[:-1])


def test_a_stop_on_the_last_allowed_token_wins_over_the_length(model, token_bytes):
    free = one(model, token_bytes, generate(max_tokens=12))
    for count in range(1, 12):
        tokens = free.token_ids[:count]
        text, last = b"".join(token_bytes[i] for i in tokens), token_bytes[tokens[-1]]
        if last and text.count(last) == 1:
            result = one(model, token_bytes, generate(max_tokens=count, stop=(last,)))
            assert result.finish_reason == "stop"
            assert result.token_ids == tokens
            return
    raise AssertionError("no token of the text occurs once: choose another seed")


def test_a_stop_in_the_prompt_does_not_count(model, token_bytes):
    prompt = ids(9, 3)
    stop = token_bytes[prompt[-1]]
    free = one(model, token_bytes, generate(prompt=prompt))
    result = one(model, token_bytes, generate(prompt=prompt, stop=(stop,)))
    expected = free.text.find(stop)
    assert result.text == (free.text if expected < 0 else free.text[:expected])


def test_a_stop_that_begins_in_the_prompt_does_not_count(model, token_bytes):
    prompt = ids(9, 3)
    before = token_bytes[prompt[-1]]
    free = one(model, token_bytes, generate(prompt=prompt, max_tokens=12))
    assert before
    for bytes_of_answer in (1, 2, 5):
        stop = before[-1:] + free.text[:bytes_of_answer]
        assert stop not in free.text
        result = one(model, token_bytes, generate(prompt=prompt, max_tokens=12, stop=(stop,)))
        assert (result.text, result.finish_reason) == (free.text, "length")


def test_end_of_text(model, token_bytes):
    free = one(model, token_bytes, generate(max_tokens=8))
    end = free.token_ids[2]
    request = generate(max_tokens=8, ignore_eos=False)
    result = one(model, token_bytes, request, eos_token_ids=(end,))
    first = free.token_ids.index(end)
    assert result.finish_reason == "eos"
    assert result.token_ids == free.token_ids[: first + 1]
    ignored = one(model, token_bytes, generate(max_tokens=8), eos_token_ids=(end,))
    assert ignored.token_ids == free.token_ids


def test_banned_tokens_are_never_chosen(model, token_bytes):
    banned = tuple(range(0, VOCAB, 2))
    requests = [generate(i, temperature=i / 2, seed=i, max_tokens=20) for i in range(6)]
    results = run(model, token_bytes, requests, banned_token_ids=banned)
    assert all(token % 2 for result in results.values() for token in result.token_ids)


def test_seeds_decide_sampled_texts(model, token_bytes):
    prompt = ids(5)
    requests = [
        generate(i, prompt=prompt, temperature=1.5, seed=seed, max_tokens=12)
        for i, seed in enumerate((7, 7, 8, -1, 2**64 - 1, 2**70))
    ]
    results = run(model, token_bytes, requests)
    tokens = [results[i].token_ids for i in range(6)]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]
    assert tokens[3] == tokens[4]


def test_rank_scores_are_ordered_like_the_documents(model, token_bytes):
    documents = [ids(n, n) for n in (1, 7, 2, 30)]
    result = one(model, token_bytes, RankRequest(0, ids(20), documents))
    assert result.token_counts == [1, 7, 2, 30]
    reversed_ = one(model, token_bytes, RankRequest(0, ids(20), documents[::-1]))
    assert reversed_.mean_nll == result.mean_nll[::-1]


def test_a_ranking_larger_than_a_step_is_cut(any_model, token_bytes):
    documents = [ids(n % 13 + 1, n) for n in range(60)]
    request = RankRequest(0, ids(40), documents)
    whole = one(any_model, token_bytes, request, max_step_tokens=4096)
    for budget in (1, 16, 100):
        assert one(any_model, token_bytes, request, max_step_tokens=budget) == whole


def test_more_requests_than_places(model, token_bytes):
    requests = [generate(i, max_tokens=1 + i % 7) for i in range(40)]
    crowded = run(model, token_bytes, requests, max_running=64)
    narrow = run(model, token_bytes, requests, max_running=3, max_step_tokens=8)
    assert narrow == crowded


def test_a_freed_place_is_taken_at_the_next_step(model, token_bytes):
    engine = Engine(model, token_bytes, EngineConfig(max_running=1))
    engine.submit(generate(0, max_tokens=2))
    engine.submit(generate(1, max_tokens=1))
    finished = [[result.request_id for result in engine.step()] for _ in range(3)]
    assert finished == [[], [0], [1]]


def test_requests_join_a_running_batch(model, token_bytes):
    alone = one(model, token_bytes, generate(1, max_tokens=5))
    engine = Engine(model, token_bytes, EngineConfig())
    engine.submit(generate(0, max_tokens=20))
    for _ in range(4):
        assert engine.step() == []
    engine.submit(generate(1, max_tokens=5))
    engine.submit(RankRequest(2, ids(5), [ids(3)]))
    assert [type(result) for result in engine.step()] == [RankResult]
    assert drain(engine)[1] == alone


def test_a_small_cache_makes_requests_wait(model, token_bytes):
    block = 2 * 2 * 32 * 32 * 4  # keys and values, layers, tokens, width, bytes
    requests = [generate(i, max_tokens=30) for i in range(8)]
    requests += [RankRequest(10 + i, ids(50, i), [ids(4)] * 2) for i in range(8)]
    roomy = run(model, token_bytes, requests)
    tight = run(model, token_bytes, requests, kv_cache_bytes=5 * block)
    assert tight == roomy
    refused = one(model, token_bytes, generate(max_tokens=60), kv_cache_bytes=block)
    assert (refused.code, "2 cache blocks" in refused.message) == ("cache_exceeded", True)


def test_a_cache_without_room_for_one_block(model, token_bytes):
    with pytest.raises(ValueError, match="one block takes 16384"):
        Engine(model, token_bytes, EngineConfig(kv_cache_bytes=16383))


def test_token_bytes_of_another_model(model):
    with pytest.raises(ValueError, match="3 entries"):
        Engine(model, [b"a", b"b", b"c"], EngineConfig())


NARROW, WIDE = torch.zeros(2, 31), torch.zeros(2, 32)


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (generate(9, prompt=[]), "empty_input", "prompt"),
        (generate(9, prompt=[1, -5]), "invalid_token", "-5"),
        (generate(9, prompt=[1, VOCAB]), "invalid_token", "no prompt vectors"),
        (generate(9, prompt=[1, VOCAB + 2], vectors="wide"), "invalid_token", "2 prompt"),
        (generate(9, vectors="narrow"), "unknown_prompt_vectors", "[2, 31]"),
        (generate(9, vectors="nan"), "unknown_prompt_vectors", "finite"),
        (generate(9, vectors="none"), "unknown_prompt_vectors", "'none'"),
        (generate(9, max_tokens=0), "invalid_sampling", "max_tokens"),
        (generate(9, max_tokens=-1), "invalid_sampling", "max_tokens"),
        (generate(9, max_tokens=124), "context_exceeded", "129 positions"),
        (generate(9, max_tokens=10**9), "context_exceeded", "128"),
        (generate(9, prompt=ids(500)), "context_exceeded", "500 tokens"),
        (generate(9, temperature=-0.1), "invalid_sampling", "temperature"),
        (generate(9, temperature=float("nan")), "invalid_sampling", "temperature"),
        (generate(9, temperature=float("inf")), "invalid_sampling", "temperature"),
        (generate(9, top_p=0.0), "invalid_sampling", "top_p"),
        (generate(9, top_p=1.1), "invalid_sampling", "top_p"),
        (generate(9, top_p=float("nan")), "invalid_sampling", "top_p"),
        (generate(9, top_k=-1), "invalid_sampling", "top_k"),
        (generate(9, stop=(b"a", b"")), "invalid_sampling", "stop"),
        (generate(9, stop=(b"ab",) * 10_000), "invalid_sampling", "10000 stops"),
        (generate(9, stop=(b"x" * 1_000_000,)), "invalid_sampling", "1000000 bytes"),
        (generate(9, prompt=["a", "b"]), "invalid_token", "whole numbers, not str"),
        (generate(9, prompt=[3, 1.5]), "invalid_token", "whole numbers, not float"),
        (RankRequest(9, [1], [[1], [1, None]]), "invalid_token", "document 1"),
        (RankRequest(9, [1], [[1], [2]], top_n=0), "invalid_request", "top_n is 0"),
        (RankRequest(9, [1], [[1], [2]], top_n=1.5), "invalid_request", "top_n is 1.5"),
        (RankRequest(9, [], [[1]]), "empty_input", "query"),
        (RankRequest(9, [1], []), "empty_documents", "documents"),
        (RankRequest(9, [1], [[1], []]), "empty_input", "document 1"),
        (RankRequest(9, [1], [[1], [600]]), "invalid_token", "document 1"),
        (RankRequest(9, [1], [[VOCAB]], "wide"), "invalid_token", "nothing to score"),
        (RankRequest(9, ids(60), [ids(69)]), "context_exceeded", "129 positions"),
        (RankRequest(9, ids(5), [[3] * 100_000]), "context_exceeded", "document 0"),
    ],
)
def test_bad_requests_fail_alone(model, token_bytes, request_, code, words):
    good = [generate(0), RankRequest(1, ids(4), [ids(3)])]
    vectors = {"narrow": NARROW, "wide": WIDE, "nan": WIDE / 0}
    expected = run(model, token_bytes, good)
    results = run(model, token_bytes, [good[0], request_, good[1]], vectors)
    failure = results.pop(9)
    assert isinstance(failure, RequestFailed)
    assert failure.code == code
    assert words in failure.message
    assert results == expected


def test_the_whole_context_can_be_used(model, token_bytes):
    assert len(one(model, token_bytes, generate(max_tokens=123)).token_ids) == 123
    result = one(model, token_bytes, RankRequest(0, ids(60), [ids(68)]))
    assert result.token_counts == [68]


def test_an_id_in_use_is_refused_for_the_newcomer(model, token_bytes):
    engine = Engine(model, token_bytes, EngineConfig())
    engine.submit(generate(0, max_tokens=3))
    engine.submit(generate(0, max_tokens=3))
    (refused,) = engine.step()
    assert refused.code == "duplicate_request"
    assert isinstance(drain(engine)[0], GenerateResult)


def test_cancelled_requests_leave_at_the_next_step(model, token_bytes):
    engine = Engine(model, token_bytes, EngineConfig(max_running=1))
    for i in range(3):
        engine.submit(generate(i, max_tokens=10))
    engine.submit(RankRequest(3, ids(4), [ids(3)]))
    engine.step()
    for i in (0, 2, 99):
        engine.cancel(i)
    results = engine.step()
    assert {result.request_id: result.code for result in results} == {
        0: "cancelled",
        2: "cancelled",
    }
    assert isinstance(drain(engine)[1], GenerateResult)
    assert not engine.has_work


def test_cancelling_before_the_first_step(model, token_bytes):
    engine = Engine(model, token_bytes, EngineConfig())
    engine.submit(generate(0))
    engine.cancel(0)
    (result,) = engine.step()
    assert result.code == "cancelled"
    assert not engine.has_work


@pytest.mark.parametrize("poisoned", ["prompt", "decode", "rank"])
def test_an_exception_costs_only_its_request(model, token_bytes, monkeypatch, poisoned):
    good = [generate(i) for i in range(3)] + [RankRequest(5, ids(5), [ids(4), ids(1)])]
    expected = run(model, token_bytes, good)
    marker = 77
    bad = {
        "prompt": generate(9, prompt=[marker, 4]),
        "decode": generate(9, max_tokens=6),
        "rank": RankRequest(9, ids(5), [[marker, 5]]),
    }[poisoned]
    victim = one(model, token_bytes, bad)
    watched = victim.token_ids[2] if poisoned == "decode" else marker
    original = type(model).forward

    def failing(self, batch, cache):
        position = 7 if poisoned == "decode" else None
        for token, where in zip(batch.token_ids.tolist(), batch.positions.tolist(), strict=True):
            if token == watched and where == (position or where):
                raise RuntimeError("planted")
        return original(self, batch, cache)

    monkeypatch.setattr(type(model), "forward", failing)
    results = run(model, token_bytes, [*good[:2], bad, *good[2:]])
    failure = results.pop(9)
    assert (failure.code, "planted" in failure.message) == ("internal_error", True)
    assert results == expected


def test_scores_that_are_not_finite_cost_only_their_request(model, token_bytes):
    vectors = {"huge": torch.full((1, 32), 3e38)}
    good = [generate(0, max_tokens=30), RankRequest(1, ids(4), [ids(3)])]
    bad = [
        generate(8, prompt=[VOCAB, 3], vectors="huge"),
        generate(7, prompt=[VOCAB, 3], vectors="huge", temperature=1.0),
        RankRequest(9, [VOCAB, 3], [ids(3)], "huge"),
    ]
    # Few blocks: the good requests after the bad ones get the blocks these left behind.
    order = [*bad, *good, *(dataclasses.replace(r, request_id=r.request_id + 20) for r in good)]
    results = run(model, token_bytes, order, vectors, max_running=2)
    assert {results[i].code for i in (7, 8, 9)} == {"not_finite"}
    expected = run(model, token_bytes, good)
    for i in (0, 1):
        assert dataclasses.replace(results[i + 20], request_id=i) == expected[i] == results[i]


def test_prompt_vectors_of_each_request(model, token_bytes):
    generator = torch.Generator().manual_seed(0)
    vectors = {key: torch.randn(3, 32, generator=generator) for key in "ab"}
    prompt = [VOCAB, VOCAB + 1, VOCAB + 2, 5, 6]
    requests = [
        generate(0, prompt=prompt, vectors="a"),
        generate(1, prompt=prompt, vectors="b"),
        generate(2, prompt=prompt[3:]),
        RankRequest(3, prompt, [ids(4), [7, VOCAB + 1, 8]], "b"),
    ]
    together = run(model, token_bytes, requests, vectors)
    assert together[0].token_ids != together[1].token_ids
    assert together[3].token_counts == [4, 2]
    for request in requests:
        assert (
            run(model, token_bytes, [request], vectors)[request.request_id]
            == (together[request.request_id])
        )


def test_registering_a_key_again_changes_later_requests_only(model, token_bytes):
    engine = Engine(model, token_bytes, EngineConfig())
    engine.register_prompt_vectors("a", torch.ones(1, 32))
    engine.submit(generate(0, prompt=[VOCAB, 3], vectors="a"))
    engine.step()
    engine.register_prompt_vectors("a", torch.arange(32.0).unsqueeze(0))
    engine.submit(generate(1, prompt=[VOCAB, 3], vectors="a"))
    results = drain(engine)
    ones = run(
        model,
        token_bytes,
        [generate(0, prompt=[VOCAB, 3], vectors="a")],
        {"a": torch.ones(1, 32)},
    )
    assert results[0] == ones[0]
    assert results[1].token_ids != results[0].token_ids


@st.composite
def workloads(draw):
    """Requests of both kinds with all manner of lengths, and an order to run them in."""
    requests = []
    for i in range(draw(st.integers(2, 10))):
        size = draw(st.integers(1, 60))
        if draw(st.booleans()):
            documents = [ids(n, n + i) for n in draw(st.lists(st.integers(1, 40), min_size=1))]
            requests.append(RankRequest(i, ids(size, i), documents[:12]))
        else:
            params = {
                "max_tokens": draw(st.integers(1, 12)),
                "temperature": draw(st.sampled_from([0.0, 0.8, 1.5])),
                "top_k": draw(st.sampled_from([0, 5])),
                "top_p": draw(st.sampled_from([1.0, 0.9])),
                "seed": i,
            }
            requests.append(generate(i, prompt=ids(size, i), **params))
    config = {
        "max_running": draw(st.sampled_from([1, 3, 64])),
        "max_step_tokens": draw(st.sampled_from([32, 200, 4096])),
    }
    return requests, draw(st.permutations(requests)), config


@settings(max_examples=10, deadline=None)
@given(workload=workloads())
def test_results_are_bitwise_the_same_in_any_company(any_model, token_bytes, workload):
    requests, order, config = workload
    together = run(any_model, token_bytes, order, **config)
    for request in requests:
        assert one(any_model, token_bytes, request) == together[request.request_id]


def huge_vectors():
    """Vectors whose squares overflow FP32: their norm is not finite there, and is in FP64."""
    return torch.full((1, 32), 3e38) * torch.tensor([1.0, -1.0] * 16)


def test_scores_that_are_not_finite_are_computed_again_in_a_higher_precision(
    model, directory, token_bytes
):
    precise = load_model(directory, "fp64")
    engine = Engine(model, token_bytes, EngineConfig(), lambda: precise)
    vectors = huge_vectors()
    engine.register_prompt_vectors("huge", vectors)
    good = [generate(0, max_tokens=9), RankRequest(1, ids(4), [ids(3)])]
    bad = [
        generate(8, prompt=[VOCAB, 3], vectors="huge"),
        RankRequest(9, [VOCAB, 3], [ids(3), ids(5)], "huge"),
    ]
    for request in [*bad, *good]:
        engine.submit(request)
    results = drain(engine)
    assert {i: results[i].recomputed_in for i in results} == {
        0: None,
        1: None,
        8: "fp64",
        9: "fp64",
    }
    expected = run(precise, token_bytes, bad, {"huge": vectors})
    for i in (8, 9):
        assert dataclasses.replace(results[i], recomputed_in=None) == expected[i]
    assert run(model, token_bytes, good) == {i: results[i] for i in (0, 1)}


def test_what_no_precision_computes_fails_with_the_reason(model, directory, token_bytes):
    def missing():
        raise MemoryError("no room")

    for more_precise, words in ((lambda: model, "NaN"), (missing, "no room")):
        engine = Engine(model, token_bytes, EngineConfig(), more_precise)
        engine.register_prompt_vectors("huge", huge_vectors())
        engine.submit(generate(8, prompt=[VOCAB, 3], vectors="huge"))
        (result,) = drain(engine).values()
        assert result.code == "not_finite"
        assert words in result.message
        assert not engine.has_work


def test_a_request_under_rescue_can_be_cancelled_and_keeps_its_id(model, directory, token_bytes):
    precise = load_model(directory, "fp64")
    engine = Engine(model, token_bytes, EngineConfig(), lambda: precise)
    engine.register_prompt_vectors("huge", huge_vectors())
    engine.submit(generate(8, prompt=[VOCAB, 3], max_tokens=50, vectors="huge"))
    assert engine.step() == []
    engine.submit(generate(8))
    (refused,) = engine.step()
    assert refused.code == "duplicate_request"
    engine.cancel(8)
    (result,) = engine.step()
    assert result.code == "cancelled"
    assert not engine.has_work
