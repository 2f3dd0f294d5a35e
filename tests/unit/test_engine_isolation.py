"""What a request that fails, is cancelled or is not finite leaves behind: nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nightjar.gpu_worker.engine import (
    BeamSearch,
    Engine,
    EngineConfig,
    GenerateResult,
    RankRequest,
    RequestFailed,
    loop,
    sizing,
)
from nightjar.gpu_worker.models import Decoder, KVTensors, load_model
from tests.engines import VOCAB, assert_nothing_held, block_bytes, drain, generate, ids, one

pytestmark = pytest.mark.usefixtures("one_thread")

HUGE = torch.full((1, 32), 3e38)
"""A prompt vector whose norm overflows in FP32: the keys and values after it are NaN."""
HUGE_IN_FP32 = HUGE * torch.tensor([1.0, -1.0] * 16)
"""One whose norm is finite in FP64."""


@pytest.fixture(scope="module")
def precise(directory):
    return load_model(directory, "fp64")


def engine_of(model, token_bytes, more_precise=None, **config):
    engine = Engine(model, token_bytes, EngineConfig(**config), more_precise)
    engine.register_prompt_vectors("huge", HUGE if more_precise is None else HUGE_IN_FP32)
    return engine


def spoiled(request_id=9, prompt=60, **params):
    return generate(request_id, [VOCAB, *ids(prompt)], vectors="huge", **params)


def test_a_copy_into_a_cleared_block_is_not_lost(model, token_bytes):
    """Samples fork into blocks that held NaN before."""
    engine = engine_of(model, token_bytes)
    assert drain(engine, spoiled(prompt=100))[9].code == "not_finite"
    samples = generate(0, ids(10), n=2, temperature=1.0)
    assert drain(engine, samples)[0] == one(model, token_bytes, samples)


def test_samples_of_a_prompt_that_is_not_finite_leave_nothing_in_its_blocks(model, token_bytes):
    engine = engine_of(model, token_bytes)
    failed = drain(engine, spoiled(prompt=20, n=2, temperature=1.0))[9]
    assert failed.code == "not_finite"
    follower = generate(0, ids(2))
    assert drain(engine, follower)[0] == one(model, token_bytes, follower)


def test_a_prompt_cancelled_before_its_scores_were_seen_leaves_nothing(model, token_bytes):
    engine = engine_of(
        model, token_bytes, max_step_tokens=64, kv_cache_bytes=4 * block_bytes(model)
    )
    engine.submit(spoiled(prompt=90))
    assert engine.step() == []
    engine.cancel(9)
    (cancelled,) = engine.step()
    assert cancelled.code == "cancelled"
    follower = generate(0, ids(10), max_tokens=100)
    assert drain(engine, follower)[0] == one(model, token_bytes, follower)


def test_a_sample_that_fails_while_another_starts_costs_only_its_request(
    model, token_bytes, monkeypatch
):
    """Two of three samples have places; when the first ends, the third starts, and in the same
    step the second fails."""
    params = {"prompt": ids(5), "n": 3, "temperature": 1.5, "seed": 3}
    first, second, _ = (
        output.token_ids for output in one(model, token_bytes, generate(0, **params)).outputs
    )
    forward = Decoder.forward

    def failing(self, batch, cache):
        if batch.decode is not None and second[1] in batch.token_ids.tolist():
            raise RuntimeError("planted")
        return forward(self, batch, cache)

    neighbour = generate(5, ids(4))
    expected = one(model, token_bytes, neighbour)
    monkeypatch.setattr(Decoder, "forward", failing)
    engine = engine_of(model, token_bytes, max_running=2)
    results = drain(engine, generate(0, stop_token_ids=(first[1],), **params), neighbour)
    assert (results[0].code, "planted" in results[0].message) == ("internal_error", True)
    assert results[5] == expected
    assert_nothing_held(engine)


@pytest.mark.parametrize("errors", [1, 2], ids=["together", "one by one"])
def test_where_the_device_has_failed_nobody_is_blamed(model, token_bytes, monkeypatch, errors):
    """Found out when a step's requests fail together, or when the first of them fails by itself:
    whoever came next would fail, too, so the step raises and the process ends."""
    asked = []

    def failing(*_):
        raise RuntimeError("an illegal memory access")

    def require_working(device):
        asked.append(device)
        if len(asked) == errors:
            raise RuntimeError("the device has failed")

    engine = engine_of(model, token_bytes)
    engine.submit(generate(0, ids(4)))
    engine.submit(generate(1, ids(5)))
    monkeypatch.setattr(Decoder, "forward", failing)
    monkeypatch.setattr(loop, "require_working", require_working)
    with pytest.raises(RuntimeError, match="the device has failed"):
        engine.step()
    assert asked == [torch.device("cpu")] * errors


def test_a_block_copied_for_an_ended_text_can_be_copied_to_again(model, token_bytes, monkeypatch):
    """Samples end with their first token in the step in which a beam search forks; of two copies
    into one block, it is not said which is made."""
    copy = KVTensors.copy

    def checked(self, pairs):
        assert len({target for _, target in pairs}) == len(pairs)
        copy(self, pairs)

    monkeypatch.setattr(KVTensors, "copy", checked)
    search = generate(0, ids(9, 1), max_tokens=12, beams=BeamSearch(4))
    expected = one(model, token_bytes, search)
    for wait in range(3):
        engine = engine_of(model, token_bytes)
        engine.submit(search)
        for _ in range(wait):
            assert engine.step() == []
        samples = generate(1, ids(7), max_tokens=1, n=6, temperature=1.0)
        results = drain(engine, samples)
        assert results[0] == expected
        assert results[1] == one(model, token_bytes, samples)


def test_a_request_that_breaks_admission_fails_alone(model, token_bytes):
    class Broken:
        def __len__(self):
            raise RuntimeError("planted")

    results = drain(engine_of(model, token_bytes), generate(0), generate(9, Broken()))
    assert results[9].code == "internal_error"
    assert results[9].message == "RuntimeError: planted"
    assert isinstance(results[0], GenerateResult)


def test_cancelling_what_is_not_rescued_does_not_cancel_a_later_request(
    model, precise, token_bytes
):
    engine = engine_of(model, token_bytes, lambda: precise)
    assert drain(engine, spoiled(8))[8].recomputed_in == "fp64"
    engine.cancel(9)
    assert drain(engine) == {}
    assert isinstance(drain(engine, spoiled(9))[9], GenerateResult)


def test_what_fits_the_first_engine_fits_the_second(model, precise, token_bytes):
    """Whose numbers are twice as wide."""
    cache = 4 * block_bytes(model)
    engine = engine_of(model, token_bytes, lambda: precise, kv_cache_bytes=cache)
    result = drain(engine, spoiled(prompt=100))[9]
    assert isinstance(result, GenerateResult)
    assert result.recomputed_in == "fp64"
    assert_nothing_held(engine)


def test_a_second_engine_without_room_says_what_was_wrong_first(
    model, precise, token_bytes, monkeypatch
):
    monkeypatch.setattr(sizing, "RESCUE_CACHE_BYTES", 4 * block_bytes(model))
    engine = engine_of(model, token_bytes, lambda: precise)
    failure = drain(engine, spoiled(prompt=100))[9]
    assert failure.code == "not_finite"
    assert "NaN or infinite, and in fp64: " in failure.message
    assert "the cache has 2" in failure.message


def test_a_higher_precision_that_cannot_be_loaded_is_tried_once(model, token_bytes):
    tried = []

    def missing():
        tried.append(1)
        raise FileNotFoundError("model.safetensors is gone")

    engine = engine_of(model, token_bytes, missing)
    results = drain(engine, *(spoiled(i) for i in range(4)))
    assert {result.code for result in results.values()} == {"not_finite"}
    assert all("model.safetensors is gone" in result.message for result in results.values())
    assert len(tried) == 1


def test_a_kept_hidden_state_keeps_nothing_else(model, token_bytes):
    """Samples that wait for a place hold one row, not all rows of the step."""
    engine = engine_of(model, token_bytes, max_running=2)
    engine.submit(generate(0, n=3, temperature=1.0))
    engine.submit(RankRequest(1, ids(20), [ids(30)] * 3))
    engine.step()
    kept = engine.live[0].prefix.last_hidden
    assert kept.untyped_storage().nbytes() == kept.numel() * kept.itemsize


WHERE = {
    "waiting": {"prompt": 30},
    "in prefill": {"prompt": 100},
    "running": {"prompt": 5},
    "samples": {"prompt": 40, "n": 5, "temperature": 1.0},
    "beams": {"prompt": 40, "beams": BeamSearch(3)},
}


@pytest.mark.parametrize("where", WHERE)
def test_a_cancelled_request_gives_everything_back(model, token_bytes, where):
    params = dict(WHERE[where])
    engine = engine_of(model, token_bytes, max_running=3, max_step_tokens=40)
    if where == "waiting":
        for i in range(3):
            engine.submit(generate(i, ids(3, i), max_tokens=50))
        engine.step()
    prompt = ids(params.pop("prompt"))
    engine.submit(generate(9, prompt, max_tokens=20, **params))
    for _ in range(2 if where in ("waiting", "in prefill") else 5):
        assert engine.step() == []
    job = engine.live[9]
    state = {
        "waiting": job.prefix.table is None,
        "in prefill": 0 < job.prefix.computed < len(prompt),
        "running": len(job.running) == 1,
        "samples": len(job.running) == 3 and len(job.waiting) == 2,
        "beams": len(job.running) == 3,
    }
    assert state[where]
    for i in range(10):
        engine.cancel(i)
    assert {result.code for result in engine.step()} == {"cancelled"}
    assert_nothing_held(engine)


def test_a_request_cancelled_in_rescue_gives_everything_back(model, precise, token_bytes):
    engine = engine_of(model, token_bytes, lambda: precise)
    engine.submit(spoiled(8, max_tokens=30, n=3, temperature=1.0))
    engine.submit(RankRequest(9, [VOCAB, 3], [ids(30), ids(40)], "huge"))
    results = engine.step()
    engine.cancel(8)
    results += drain(engine).values()
    assert {result.request_id: type(result).__name__ for result in results} == {
        8: "RequestFailed",
        9: "RankResult",
    }
    assert_nothing_held(engine)


@st.composite
def traffic(draw):
    """Requests of every kind and fate: (step in which it comes, request, step in which it is
    cancelled or None); limits."""
    coming = []
    for request_id in range(draw(st.integers(1, 9))):
        length = draw(st.integers(1, 70))
        head = draw(st.sampled_from([[], [VOCAB]]))
        prompt = head + ids(length, draw(st.integers(0, 2)))
        vectors = "huge" if head else None
        kind = draw(st.sampled_from(["text", "samples", "beams", "rank", "refused"]))
        if kind == "rank":
            sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
            common = ids(draw(st.sampled_from([0, 30])), 7)
            documents = [common[: 60 - size] + ids(size, size) for size in sizes]
            top_n = draw(st.sampled_from([None, 1, 2]))
            made = RankRequest(request_id, prompt[:40], documents, vectors, top_n)
        else:
            params = {
                "text": {"temperature": 0.7, "seed": request_id},
                "samples": {"n": draw(st.integers(2, 4)), "temperature": 1.0},
                "beams": {"beams": BeamSearch(draw(st.integers(2, 3)))},
                "refused": {"top_p": 7.0},
            }[kind]
            tokens = draw(st.integers(1, 12))
            made = generate(request_id, prompt, tokens, vectors, **params)
        leaves = draw(st.one_of(st.none(), st.integers(0, 12)))
        coming.append((draw(st.integers(0, 6)), made, leaves))
    limits = {
        "max_running": draw(st.sampled_from([3, 64])),
        "max_step_tokens": draw(st.sampled_from([8, 50, 2048])),
    }
    return coming, limits, draw(st.sampled_from([16, 100])), draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(traffic=traffic())
def test_no_mix_of_requests_leaks_a_block_or_touches_a_neighbour(
    model, precise, token_bytes, traffic
):
    coming, limits, blocks, rescued = traffic
    more_precise = (lambda: precise) if rescued else None
    cache = blocks * block_bytes(model)
    engine = engine_of(model, token_bytes, more_precise, kv_cache_bytes=cache, **limits)
    results = {}
    for step in range(14):
        for when, request, leaves in coming:
            if when == step:
                engine.submit(request)
            if leaves == step:
                engine.cancel(request.request_id)
        for result in engine.step():
            assert result.request_id not in results
            results[result.request_id] = result
    results |= drain(engine)
    assert_nothing_held(engine)
    assert results.keys() == {request.request_id for _, request, _ in coming}
    for _, request, leaves in coming:
        result = results[request.request_id]
        if leaves is None or not isinstance(result, RequestFailed) or result.code != "cancelled":
            alone = engine_of(model, token_bytes, more_precise, kv_cache_bytes=cache)
            assert result == drain(alone, request)[request.request_id]
