"""Beam search through the engine, against transformers' `generate`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2LMHeadModel

from nightjar.gpu_worker.engine import (
    BeamSearch,
    Engine,
    EngineConfig,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
)
from nightjar.gpu_worker.engine.kv_cache import BlockPool, BlockTable
from nightjar.gpu_worker.models import KVTensors
from tests.engines import block_bytes, drain, ids, run

pytestmark = pytest.mark.usefixtures("one_thread")
END = 3


@pytest.fixture(scope="module")
def reference(tiny_model):
    return GPT2LMHeadModel.from_pretrained(tiny_model, dtype=torch.float32).eval()


def search(request_id, tokens, width, max_tokens=8, n=1, **params):
    beams = BeamSearch(width, params.pop("length_penalty", 1.0), params.pop("early", False))
    sampling = SamplingParams(max_tokens, beams=beams, n=n, **params)
    return GenerateRequest(request_id, tokens, sampling)


def found(model, token_bytes, requests, **config):
    return run(model, token_bytes, requests, eos_token_ids=(END,), **config)


@pytest.mark.parametrize("width", [2, 4, 7])
@pytest.mark.parametrize(("length_penalty", "early"), [(1.0, False), (0.0, True), (2.0, False)])
def test_the_texts_are_those_of_transformers(
    model, reference, token_bytes, width, length_penalty, early
):
    requests = [
        search(i, ids(5 + 14 * i, i), width, n=width, length_penalty=length_penalty, early=early)
        for i in range(4)
    ]
    results = found(model, token_bytes, requests)
    for request in requests:
        tokens = torch.tensor([request.token_ids])
        expected = reference.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=8,
            do_sample=False,
            length_penalty=length_penalty,
            early_stopping=early,
            eos_token_id=END,
            pad_token_id=END,
            return_dict_in_generate=True,
            output_scores=True,
        )
        texts = [row[len(request.token_ids) :].tolist() for row in expected.sequences]
        outputs = results[request.request_id].outputs
        for output, text, score in zip(
            outputs, texts, expected.sequences_scores.tolist(), strict=True
        ):
            length = len(output.token_ids)
            assert text[:length] == output.token_ids
            assert set(text[length:]) <= {END}
            assert output.cumulative_logprob / length**length_penalty == pytest.approx(
                score, rel=1e-4
            )


def test_a_search_shares_its_prompt_and_gives_everything_back(model, token_bytes, monkeypatch):
    copies = []
    copy = KVTensors.copy
    monkeypatch.setattr(
        KVTensors, "copy", lambda self, pairs: copies.extend(pairs) or copy(self, pairs)
    )
    engine = Engine(model, token_bytes, EngineConfig(eos_token_ids=(END,)))
    free = engine.pool.available
    drain(engine, search(0, ids(70), 4))
    assert copies
    assert engine.pool.available == free


def test_a_stop_ends_a_beam(model, token_bytes):
    (free,) = found(model, token_bytes, [search(0, ids(9, 2), 3, max_tokens=10)]).values()
    stop = free.text[3:5]
    (result,) = found(
        model, token_bytes, [search(0, ids(9, 2), 3, max_tokens=10, n=3, stop=(stop,))]
    ).values()
    assert any(output.finish_reason == "stop" for output in result.outputs)
    for output in result.outputs:
        assert stop not in output.text


def test_every_token_of_a_beam_is_reported(model, token_bytes):
    """What was asked for beside a search: of each text its own tokens, as `generate` alone would
    report them after the same beginning."""
    request = search(1, ids(9), 3, n=3, logprobs=2)
    outputs = found(model, token_bytes, [request])[1].outputs
    plain = found(model, token_bytes, [search(1, ids(9), 3, n=3)])[1].outputs
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    for output in outputs:
        assert len(output.logprobs) == len(output.token_ids)
        total = sum(step.chosen for step in output.logprobs)
        assert total == pytest.approx(output.cumulative_logprob, abs=1e-5)
        for place, step in enumerate(output.logprobs):
            after = request.token_ids + output.token_ids[:place]
            alone = GenerateRequest(2, after, SamplingParams(1, logprobs=2))
            (wanted,) = found(model, token_bytes, [alone])[2].outputs[0].logprobs
            assert [token for token, _ in step.top] == [token for token, _ in wanted.top]
            assert step.top[0][1] == pytest.approx(wanted.top[0][1], abs=1e-5)


def test_a_search_wider_than_the_engine_is_refused(model, token_bytes):
    (result,) = found(model, token_bytes, [search(0, [5, 6], 5)], max_running=4).values()
    assert result.code == "invalid_sampling"
    assert "beam_width is 5, but at most 4" in result.message


@settings(max_examples=15, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 70), st.integers(1, 5), st.integers(1, 40)), min_size=1, max_size=4
    ),
    running=st.sampled_from([5, 64]),
)
def test_company_and_a_cache_that_just_fits_change_nothing(model, token_bytes, shapes, running):
    requests = [
        search(i, ids(length, i), width, max_tokens=count)
        for i, (length, width, count) in enumerate(shapes)
    ]
    block = block_bytes(model)
    needed = []
    for length, width, count in shapes:
        text = -(-(length + count - 1) // 32)
        own = width * (text - length // 32) + -(-length // 32)
        needed.append(text if width == 1 else own)
    together = found(
        model, token_bytes, requests, max_running=running, kv_cache_bytes=max(needed) * block
    )
    for request in requests:
        alone = found(model, token_bytes, [request])[request.request_id]
        assert isinstance(alone, GenerateResult)
        assert together[request.request_id] == alone


def test_a_reservation_cannot_be_overdrawn():
    pool = BlockPool(4, 4)
    assert pool.reserve(2)
    table = BlockTable(pool, 2)
    with pytest.raises(RuntimeError, match="3 blocks asked of a reservation of 2"):
        table.split(3)
