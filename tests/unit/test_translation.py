"""Messages to engine requests and back, with a real tokenizer."""

import dataclasses
from pathlib import Path

import msgspec
import pytest

from nightjar.checkpoints import Tokenizer
from nightjar.gpu_worker.compute import messages
from nightjar.gpu_worker.compute.translation import Translator
from nightjar.gpu_worker.engine import (
    BeamSearch,
    GenerateOutput,
    GenerateRequest,
    GenerateResult,
    RankRequest,
    RankResult,
    RequestFailed,
    SamplingParams,
    TokenLogprobs,
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    """With one embedding row more than there are tokens."""
    return Tokenizer.read(tiny_model / "tokenizer.json", 513)


@pytest.fixture(scope="module")
def translator(tokenizer: Tokenizer) -> Translator:
    return Translator(tokenizer)


def request_for(sampling: SamplingParams) -> GenerateRequest:
    return GenerateRequest(4, [1, 2], sampling, "v@1")


def test_a_request_is_carried_as_it_is(translator: Translator) -> None:
    """Each field has a value of its own, so that none can be dropped or exchanged on the wire."""
    sampling = SamplingParams(
        max_tokens=30,
        temperature=0.1,
        top_k=2,
        top_p=0.3,
        min_p=0.4,
        top_a=0.45,
        seed=5,
        repetition_penalty=0.6,
        presence_penalty=0.7,
        frequency_penalty=0.8,
        logit_bias={9: 0.9},
        bad_words=((10,),),
        stop=(b"10",),
        stop_token_ids=(11,),
        min_tokens=12,
        ignore_eos=True,
        n=13,
        beams=BeamSearch(14, 1.5, early_stopping=True),
        logprobs=16,
    )
    default = SamplingParams(1)
    for name in (field.name for field in dataclasses.fields(SamplingParams)):
        assert getattr(sampling, name) != getattr(default, name), name
    frame = messages.encode([messages.Generate(request_for(sampling))])
    (message,) = messages.decode_to_compute(frame)
    assert isinstance(message, messages.Generate)
    assert translator.request(message) == request_for(sampling)


def test_a_message_without_a_newer_field_is_read() -> None:
    """A new field has a default that changes nothing, for frames and bodies that lack it."""
    written = msgspec.to_builtins(messages.Generate(request_for(SamplingParams(5))))
    del written["request"]["sampling"]["top_a"]
    (message,) = messages.decode_to_compute(msgspec.msgpack.encode([written]))
    assert message == messages.Generate(request_for(SamplingParams(5, top_a=0.0)))


def test_bad_words_are_tokens_with_and_without_a_space(
    translator: Translator, tokenizer: Tokenizer
) -> None:
    plain = request_for(SamplingParams(5, seed=3))
    found = translator.request(messages.Generate(plain, ["좋은", " fox", "jumps over"]))
    words = ["좋은", " 좋은", " fox", "jumps over", " jumps over"]
    expected = tuple(tuple(tokenizer.encode(word)) for word in words)
    assert found == request_for(SamplingParams(5, seed=3, bad_words=expected))
    assert len(set(expected)) == 5


def test_outputs_are_reported_in_bytes(translator: Translator, tokenizer: Tokenizer) -> None:
    end = tokenizer.token_id("<|endoftext|>")
    assert end is not None
    ids = [*tokenizer.encode("가 x"), end]
    unused = len(tokenizer.token_bytes) - 1
    assert tokenizer.token(unused) is None
    steps = [TokenLogprobs(-float(i), ((ids[0], -0.5), (unused, -9.0))) for i in range(len(ids))]
    outputs = [
        GenerateOutput(ids, "가 x".encode(), "eos", steps, -3.0),
        GenerateOutput([5], b"y", "length"),
    ]
    answer = translator.answer(GenerateResult(7, outputs, 2))
    assert isinstance(answer, messages.Generated)
    first, second = answer.outputs
    assert answer.ticket == 7
    assert (first.text, first.completion_tokens, first.finish_reason) == (
        "가 x".encode(),
        len(ids),
        "eos",
    )
    assert second == messages.Output(b"y", 1, "length", None)
    assert first.reports is not None
    assert b"".join(report.token for report in first.reports) == "가 x<|endoftext|>".encode()
    assert first.reports[-1].begin == len("가 x".encode())
    for report, after in zip(first.reports, first.reports[1:], strict=False):
        assert after.begin == report.begin + len(report.token)
    assert [report.logprob for report in first.reports] == [-float(i) for i in range(len(ids))]
    shown = (tokenizer.token_bytes[ids[0]], -0.5)
    assert first.reports[0].top == [shown, (f"token_id:{unused}".encode(), -9.0)]


def test_rankings_and_failures(translator: Translator) -> None:
    asked = RankRequest(3, [1], [[2], [3, 4]], "v@1", 1)
    (message,) = messages.decode_to_compute(messages.encode([messages.Rank(asked)]))
    assert isinstance(message, messages.Rank)
    assert translator.request(message) == asked
    ranked = translator.answer(RankResult(3, [0.5, 1.5], [1, 2], 1))
    assert ranked == messages.Ranked(3, [0.5, 1.5], [1, 2])
    failed = translator.answer(RequestFailed(3, "invalid_token", "why"))
    assert failed == messages.Failed(3, "invalid_token", "why")
