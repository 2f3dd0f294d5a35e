"""From a stored request to a message, and from the compute process's answer to OpenAI's object."""

import codecs
import dataclasses
import json
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion

from nightjar.gpu_worker.compute import messages
from nightjar.gpu_worker.engine.requests import FinishReason
from nightjar.gpu_worker.worker.answers import Computed, make_message, make_result
from nightjar.jobs.equality import derived_seed
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import ClaimedRequest
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store.bodies import load_body
from nightjar.requests import BeamSearch, SamplingParams

BY = Computed("tiny", "bf16")


def claimed(custom_id: str = "row-0", **fields: Any) -> ClaimedRequest:
    body = validate_body(RequestKind.GENERATE, {"prompt": "hi", **fields})
    stored = json.loads(json.dumps(body))  # as it comes back from SQL
    return ClaimedRequest(5, 0, custom_id, RequestKind.GENERATE, stored, [[3, 4, 5]])


def sampling(**fields: Any) -> SamplingParams:
    return generate(**fields).request.sampling


def generate(**fields: Any) -> messages.Generate:
    message = make_message(claimed(**fields), 9)
    assert isinstance(message, messages.Generate)
    (back,) = messages.decode_to_compute(messages.encode([message]))
    assert back == message
    return message


def test_defaults_are_openais() -> None:
    seed = derived_seed(claimed().custom_id)
    assert sampling() == SamplingParams(max_tokens=16, temperature=1.0, seed=seed)


def stored(kind: RequestKind, body: dict[str, Any], segments: list[list[int]]) -> ClaimedRequest:
    """A request as it comes back from SQL, where a version before wrote only these fields."""
    return ClaimedRequest(5, 0, "row-0", kind, load_body(json.dumps(body)), segments)


def test_a_body_of_an_older_version_means_what_it_meant() -> None:
    """It lacks the fields that have come since: they change nothing."""
    body = {"prompt": "hi", "max_tokens": 7, "temperature": 0.5, "seed": 3, "stop": ["x"]}
    message = make_message(stored(RequestKind.GENERATE, body, [[3, 4]]), 9)
    assert isinstance(message, messages.Generate)
    expected = SamplingParams(max_tokens=7, temperature=0.5, seed=3, stop=(b"x",))
    assert message.request.sampling == expected


@given(missing=st.sets(st.sampled_from(sorted(set(claimed().body) - {"prompt", "max_tokens"}))))
def test_any_missing_field_takes_its_default(missing: set[str]) -> None:
    whole = claimed()
    body = {name: value for name, value in whole.body.items() if name not in missing}
    older = stored(RequestKind.GENERATE, body, [[3, 4, 5]])
    assert make_message(older, 9) == make_message(whole, 9)


def test_a_ranking_of_an_older_version_returns_every_document() -> None:
    request = stored(RequestKind.RANK, {"query": "q", "documents": ["a", "b"]}, [[1], [2], [3]])
    message = make_message(request, 9)
    assert isinstance(message, messages.Rank)
    assert message.request.top_n is None
    result = make_result(request, messages.Ranked(9, [2.0, 1.0], [1, 1]), BY)
    assert result.body is not None
    assert [one["index"] for one in result.body["results"]] == [1, 0]


def test_every_field_reaches_the_compute_process() -> None:
    given = {
        "max_tokens": 40,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "top_a": 0.2,
        "seed": 12,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "min_tokens": 3,
        "ignore_eos": True,
        "n": 2,
        "logprobs": 4,
    }
    expected: dict[str, Any] = given | {
        "logit_bias": {17: -5.0},
        "stop": ("끝".encode(),),
        "stop_token_ids": (8,),
    }
    spelt: dict[str, Any] = {"logit_bias": {"17": -5}, "stop": "끝", "stop_token_ids": [8]}
    asked = generate(**given, **spelt, bad_words=["x", "y"])
    assert asked.request.sampling == SamplingParams(**expected)
    assert asked.bad_words == ["x", "y"]
    others = {field.name for field in dataclasses.fields(SamplingParams)} - set(expected)
    assert others == {"beams", "bad_words"}  # the compute process fills the latter


def test_beams() -> None:
    asked = sampling(beam_width=3, length_penalty=0.5, early_stopping=True, n=2, seed=1)
    assert asked.beams == BeamSearch(3, 0.5, early_stopping=True)
    assert (asked.temperature, asked.n) == (0.0, 2)


def answered(*outputs: messages.Output, **fields: Any) -> dict[str, Any]:
    answer = messages.Generated(9, list(outputs))
    (back,) = messages.decode_from_compute(messages.encode([answer]))
    assert back == answer
    body = make_result(claimed(**fields), answer, BY).body
    assert body is not None
    return body


def test_several_choices_and_their_usage() -> None:
    outputs = [messages.Output(b"one", 4, "stop"), messages.Output(b"two", 16, "length")]
    result = make_result(claimed(n=2), messages.Generated(9, outputs), BY)
    assert (result.prompt_tokens, result.completion_tokens) == (3, 20)
    assert (result.requested_tokens, result.saved_tokens) == (32, 12)
    assert result.finish_reason == "stop"
    assert result.body is not None
    assert result.body["choices"] == [
        {"index": 0, "text": "one", "logprobs": None, "finish_reason": "stop"},
        {"index": 1, "text": "two", "logprobs": None, "finish_reason": "length"},
    ]
    assert result.body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 20,
        "total_tokens": 23,
        "requested_tokens": 32,
        "saved_tokens": 12,
    }


@pytest.mark.parametrize("reason", get_args(FinishReason))
def test_answers_are_those_that_openais_types_allow(reason: str) -> None:
    """Its generated clients know no other finish reason than its own."""
    report = messages.TokenReport(b"on", 0, -0.5, [(b"on", -0.5)])
    output = messages.Output(b"one", 4, reason, [report])
    text = Completion.model_validate(answered(output, logprobs=1))
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    body = validate_body(RequestKind.GENERATE, chat, chat=True)
    asked = stored(RequestKind.GENERATE, body, [[3, 4, 5]])
    answer = make_result(asked, messages.Generated(9, [output]), BY).body
    talk = ChatCompletion.model_validate(answer)
    expected = "length" if reason == "length" else "stop"
    assert [text.choices[0].finish_reason, talk.choices[0].finish_reason] == [expected] * 2


def test_an_answer_names_what_it_was_computed_in() -> None:
    generated = messages.Generated(9, [messages.Output(b"one", 4, "stop")], recomputed_in="fp32")
    ranking = stored(RequestKind.RANK, {"query": "q", "documents": ["a"]}, [[1], [2]])
    bodies = [
        make_result(claimed(), generated, BY).body,
        make_result(ranking, messages.Ranked(9, [2.0], [1]), BY).body,
    ]
    named = [
        (body["model"], body["precision"], body.get("recomputed_in")) for body in bodies if body
    ]
    assert named == [("tiny", "bf16", "fp32"), ("tiny", "bf16", None)]


def test_logprobs_are_openais_object() -> None:
    """A Korean syllable over two tokens, a stop that is cut off, and an end token."""
    reports = [
        messages.TokenReport(b"a", 0, -0.5, [(b"a", -0.5), (b"b", -1.5)]),
        messages.TokenReport(b"\xea\xb0", 1, -2.0, [(b"c", -0.1), (b"\xea\xb0", -2.0)]),
        messages.TokenReport(b"\x80", 3, -0.25, [(b"\x80", -0.25)]),
        messages.TokenReport(b" b", 4, -3.0, [(b"a", -0.25)]),
        messages.TokenReport(b"\n\n", 6, -0.125, []),
        messages.TokenReport(b"<|endoftext|>", 8, -0.0625, []),
    ]
    body = answered(messages.Output("a가 b".encode(), 6, "stop", reports), logprobs=2)
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "bytes:\\xea\\xb0", "bytes:\\x80", " b", "\n\n", "<|endoftext|>"],
        "token_logprobs": [-0.5, -2.0, -0.25, -3.0, -0.125, -0.0625],
        "top_logprobs": [
            {"a": -0.5, "b": -1.5},
            {"c": -0.1, "bytes:\\xea\\xb0": -2.0},
            {"bytes:\\x80": -0.25},
            {"a": -0.25, " b": -3.0},
            {"\n\n": -0.125},
            {"<|endoftext|>": -0.0625},
        ],
        "text_offset": [0, 1, 1, 2, 4, 4],
    }


def offsets(pieces: list[bytes], end: int | None = None) -> tuple[str, list[int]]:
    reports, begin = [], 0
    for piece in pieces:
        reports.append(messages.TokenReport(piece, begin, -1.0, []))
        begin += len(piece)
    text = b"".join(pieces)[:end]
    choice = answered(messages.Output(text, len(pieces), "length", reports), logprobs=0)["choices"][
        0
    ]
    return choice["text"], choice["logprobs"]["text_offset"]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12), st.lists(st.integers(0, 40), max_size=8), st.integers(0, 40))
def test_text_offsets_point_at_the_character_of_a_token(
    text: str, cuts: list[int], end: int
) -> None:
    data = text.encode("utf-8", "replace")
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in pairwise(places)]
    found, starts = offsets(pieces, end)
    assert found == data[:end].decode("utf-8", "replace")
    for place, start in zip(places, starts, strict=False):
        if place >= end:
            assert start == len(found)
        else:  # whole characters before the token's first byte
            assert start == len(codecs.utf_8_decode(data[:place], "replace", False)[0])


def test_a_text_that_ends_inside_a_character() -> None:
    assert offsets([b"a", b"\xea\xb0"]) == ("a\ufffd", [0, 1])
    assert offsets([b"a", b"\xea", b"\xb0", b""]) == ("a\ufffd", [0, 1, 1, 2])


@pytest.mark.parametrize(
    ("code", "status"),
    [("invalid_sampling", 400), ("context_exceeded", 400), ("internal_error", 500)],
)
def test_who_is_at_fault(code: str, status: int) -> None:
    result = make_result(claimed(), messages.Failed(9, code, "why"), BY)
    assert result.status_code == status
    assert result.error is not None
    assert (result.error.code, result.error.message) == (code, "why")


@pytest.mark.parametrize("urgent", [False, True])
def test_the_engine_is_told_which_requests_a_client_waits_for(urgent: bool) -> None:
    ranking = stored(RequestKind.RANK, {"query": "a", "documents": ["b"]}, [[1], [2]])
    for request in (claimed(), ranking):
        message = make_message(request, 7, urgent=urgent)
        (back,) = messages.decode_to_compute(messages.encode([message]))
        assert isinstance(back, (messages.Generate, messages.Rank))
        assert (back.ticket, back.request.urgent) == (7, urgent)


def test_requests_of_equal_settings_share_them_and_a_seed_that_draws_is_ones_own() -> None:
    """A seed that draws nothing is 0, so that all greedy requests of a job are asked alike."""
    greedy = [sampling(temperature=0, custom_id=f"row-{n}") for n in range(2)]
    assert greedy[0] == greedy[1] == SamplingParams(max_tokens=16, temperature=0)
    drawn = [sampling(temperature=1, custom_id=f"row-{n}") for n in range(2)]
    assert [one.seed for one in drawn] == [derived_seed(f"row-{n}") for n in range(2)]
    assert sampling(temperature=0, seed=5).seed == 5
    assert sampling(logit_bias={"7": 1.5}).logit_bias == {7: 1.5}
