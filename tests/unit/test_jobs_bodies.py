"""What the bodies of requests may hold, and what is said of those that may not."""

import math
from typing import Any

import pytest

from nightjar.jobs.lines.parsing import BodyError, validate_body
from nightjar.jobs.states import RequestKind

HALF_PAIR = "half \ud800"
COMPLETION_DEFAULTS = {
    "model": None,
    "prompt_vector": None,
    "adapter": None,
    "content_key": None,
    "max_tokens": 16,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "top_a": 0.0,
    "seed": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "bad_words": [],
    "stop": None,
    "stop_token_ids": [],
    "min_tokens": 0,
    "ignore_eos": False,
    "n": 1,
    "beam_width": None,
    "length_penalty": 1.0,
    "early_stopping": False,
    "logprobs": None,
}


def completion(**fields: Any) -> dict[str, Any]:
    return validate_body(RequestKind.GENERATE, {"prompt": "hi", **fields})


def rerank(**fields: Any) -> dict[str, Any]:
    return validate_body(RequestKind.RANK, {"query": "q", "documents": ["d"], **fields})


def nested(levels: int) -> dict[str, Any]:
    """Objects in one another."""
    return {"inner": nested(levels - 1)} if levels else {}


def test_defaults_are_filled_in() -> None:
    assert completion() == {"prompt": "hi", **COMPLETION_DEFAULTS}
    assert rerank() == {
        "model": None,
        "prompt_vector": None,
        "adapter": None,
        "content_key": None,
        "query": "q",
        "documents": ["d"],
        "top_n": None,
        "return_documents": False,
    }


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"prompt": [1, 2]}, {"prompt": [1, 2]}),
        ({"prompt": ["one"]}, {"prompt": "one"}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ["x", "y"]}, {"stop": ["x", "y"]}),
        ({"stop": []}, {"stop": []}),
        ({"stop": "\x00"}, {"stop": ["\x00"]}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"seed": -(2**63)}, {"seed": -(2**63)}),
        ({"max_tokens": 1_000_000}, {"max_tokens": 1_000_000}),
        ({"max_tokens": None, "temperature": None}, {}),
        ({"prompt": "사용자: 안녕"}, {"prompt": "사용자: 안녕"}),
        ({"min_p": 1}, {"min_p": 1.0}),
        ({"repetition_penalty": 100}, {"repetition_penalty": 100.0}),
        ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
        ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
        ({"logit_bias": {"0": 1, "50256": -100}}, {"logit_bias": {"0": 1.0, "50256": -100.0}}),
        ({"bad_words": "욕"}, {"bad_words": ["욕"]}),
        ({"bad_words": ["a", " b"]}, {"bad_words": ["a", " b"]}),
        ({"stop_token_ids": [0, 7]}, {"stop_token_ids": [0, 7]}),
        ({"min_tokens": 16}, {"min_tokens": 16}),
        ({"n": 128}, {"n": 128}),
        ({"n": 2, "best_of": 2}, {"n": 2}),
        ({"logprobs": 20}, {"logprobs": 20}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"logprobs": False}, {}),
        ({"beam_width": 4, "n": 4}, {"beam_width": 4, "n": 4, "temperature": 0.0}),
        (
            {"beam_width": 1, "temperature": 0, "length_penalty": 0.6, "early_stopping": True},
            {"beam_width": 1, "temperature": 0.0, "length_penalty": 0.6, "early_stopping": True},
        ),
    ],
)
def test_good_completions(given: dict[str, Any], kept: dict[str, Any]) -> None:
    assert completion(**given) == {"prompt": "hi", **COMPLETION_DEFAULTS, **kept}


def test_documents_become_texts() -> None:
    assert rerank(documents=["a", {"text": "b"}])["documents"] == ["a", "b"]


@pytest.mark.parametrize(
    "harmless",
    [
        {"n": 1, "best_of": 1, "echo": False, "stream": False},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}},
        {"logprobs": None, "suffix": None, "tools": None},
        {"user": "someone", "metadata": {"a": "b"}, "stream_options": {"include_usage": True}},
    ],
)
def test_fields_that_change_nothing_are_dropped(harmless: dict[str, Any]) -> None:
    assert completion(**harmless) == completion()


BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "body.prompt", "is empty"),
    ({"prompt": []}, "body.prompt", "is empty"),
    ({"prompt": [""]}, "body.prompt", "is empty"),
    ({"prompt": 7}, "body.prompt", "text or a list of token ids"),
    ({"prompt": [1, -1]}, "body.prompt", "token ids"),
    ({"prompt": [True]}, "body.prompt", "token ids"),
    ({"prompt": [1.5]}, "body.prompt", "token ids"),
    ({"prompt": [2**31]}, "body.prompt", "token ids"),
    ({"prompt": HALF_PAIR}, "body.prompt", "surrogate"),
    ({"max_tokens": 0}, "body.max_tokens", "1 to 1000000"),
    ({"max_tokens": -5}, "body.max_tokens", "1 to 1000000"),
    ({"max_tokens": 1_000_001}, "body.max_tokens", "1 to 1000000"),
    ({"max_tokens": "16"}, "body.max_tokens", "integer"),
    ({"max_tokens": 1.5}, "body.max_tokens", "integer"),
    ({"max_tokens": True}, "body.max_tokens", "integer"),
    ({"temperature": -0.1}, "body.temperature", "0 (greedy) to 2"),
    ({"temperature": 2.1}, "body.temperature", "0 (greedy) to 2"),
    ({"temperature": float("inf")}, "body.temperature", "finite"),
    ({"temperature": float("nan")}, "body.temperature", "finite"),
    ({"top_p": 0}, "body.top_p", "above 0"),
    ({"top_p": 1.01}, "body.top_p", "above 0"),
    ({"top_k": -2}, "body.top_k", "turn it off"),
    ({"seed": 2**63}, "body.seed", "64-bit"),
    ({"stop": ""}, "body.stop", "empty text"),
    ({"stop": ["a", ""]}, "body.stop", "empty text"),
    ({"stop": ["a"] * 17}, "body.stop", "at most 16"),
    ({"stop": "한" * 342}, "body.stop", "1024 bytes"),
    ({"stop": 3}, "body.stop", "text or a list"),
    ({"stop": [3]}, "body.stop", "text or a list"),
    ({"stop": HALF_PAIR}, "body.stop", "surrogate"),
    ({"stop": ["a"] * 10_000}, "body.stop", "10000 texts"),
    ({"stop": "a" * 1_000_000}, "body.stop", "1024 bytes"),
    ({"ignore_eos": 1}, "body.ignore_eos", "true or false"),
    ({"min_p": -0.1}, "body.min_p", "0 (off) to 1"),
    ({"min_p": 1.1}, "body.min_p", "0 (off) to 1"),
    ({"min_p": float("nan")}, "body.min_p", "finite"),
    ({"top_a": -0.1}, "body.top_a", "give a number from 0 (off) to 1"),
    ({"top_a": 1.1}, "body.top_a", "give a number from 0 (off) to 1"),
    ({"repetition_penalty": 0}, "body.repetition_penalty", "1 is off"),
    ({"repetition_penalty": -1.5}, "body.repetition_penalty", "1 is off"),
    ({"presence_penalty": 2.1}, "body.presence_penalty", "-2 to 2"),
    ({"frequency_penalty": -2.1}, "body.frequency_penalty", "-2 to 2"),
    ({"logit_bias": [1]}, "body.logit_bias", "an object"),
    ({"logit_bias": {"x": 1}}, "body.logit_bias", "token ids"),
    ({"logit_bias": {"05": 1}}, "body.logit_bias", "token ids"),
    ({"logit_bias": {"٣": 1}}, "body.logit_bias", "token ids"),
    ({"logit_bias": {"-1": 1}}, "body.logit_bias", "token ids"),
    ({"logit_bias": {"2147483648": 1}}, "body.logit_bias", "token ids"),
    ({"logit_bias": {"5": 100.5}}, "body.logit_bias", "token 5 must be from -100 to 100"),
    ({"logit_bias": {"5": float("nan")}}, "body.logit_bias", "token 5"),
    ({"logit_bias": {"5": "1"}}, "body.logit_bias", "token 5"),
    ({"logit_bias": {"5": True}}, "body.logit_bias", "token 5"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "body.logit_bias", "at most 1024"),
    ({"bad_words": [""]}, "body.bad_words", "empty text"),
    ({"bad_words": [3]}, "body.bad_words", "list of texts"),
    ({"bad_words": HALF_PAIR}, "body.bad_words", "surrogate"),
    ({"bad_words": ["a"] * 1025}, "body.bad_words", "at most 1024"),
    ({"bad_words": ["a" * 257]}, "body.bad_words", "256 bytes"),
    ({"stop_token_ids": 5}, "body.stop_token_ids", "list of integers"),
    ({"stop_token_ids": [True]}, "body.stop_token_ids", "list of integers"),
    ({"stop_token_ids": [-1]}, "body.stop_token_ids", "list of integers"),
    ({"stop_token_ids": [1] * 257}, "body.stop_token_ids", "at most 256"),
    ({"min_tokens": -1}, "body.min_tokens", "0 to max_tokens"),
    ({"min_tokens": 17}, "body.min_tokens", "more than max_tokens, which is 16"),
    ({"n": 0}, "body.n", "1 to 128"),
    ({"n": 1_000_000}, "body.n", "1 to 128"),
    ({"n": True}, "body.n", "integer"),
    ({"n": 2, "temperature": 0}, "body.n", "every text is the same"),
    ({"logprobs": -1}, "body.logprobs", "0 to 20"),
    ({"logprobs": 21}, "body.logprobs", "0 to 20"),
    ({"logprobs": True}, "body.logprobs", "integer"),
    ({"beam_width": 0}, "body.beam_width", "1 to 128"),
    ({"beam_width": 129}, "body.beam_width", "1 to 128"),
    ({"beam_width": 2, "n": 3}, "body.n", "more than the 2 beams"),
    ({"beam_width": 2, "temperature": 0.5}, "body.temperature", "beam_width"),
    ({"beam_width": 2, "repetition_penalty": 1.1}, "body.repetition_penalty", "beam_width"),
    ({"beam_width": 2, "presence_penalty": 1}, "body.presence_penalty", "beam_width"),
    ({"beam_width": 2, "frequency_penalty": 1}, "body.frequency_penalty", "beam_width"),
    ({"beam_width": 2, "logit_bias": {"1": 1}}, "body.logit_bias", "beam_width"),
    ({"length_penalty": 2}, "body.length_penalty", "needs a beam_width"),
    ({"early_stopping": False}, "body.early_stopping", "needs a beam_width"),
    ({"beam_width": 2, "length_penalty": 11}, "body.length_penalty", "-10 to 10"),
    ({"beam_width": 2, "early_stopping": "never"}, "body.early_stopping", "true or false"),
    ({"model": ""}, "body.model", "name"),
    ({"model": "a\x00"}, "body.model", "NUL"),
    ({"prompt_vector": ""}, "body.prompt_vector", "registered"),
    ({"prompt_vector": HALF_PAIR}, "body.prompt_vector", "surrogate"),
    ({"adapter": ""}, "body.adapter", "registered"),
    ({"adapter": 3}, "body.adapter", "registered"),
    ({"content_key": ""}, "body.content_key", "1 to 128 characters"),
    ({"content_key": "k" * 129}, "body.content_key", "1 to 128 characters"),
    ({"content_key": HALF_PAIR}, "body.content_key", "surrogate"),
]
BAD_RERANKS: list[tuple[dict[str, Any], str, str]] = [
    ({"query": ""}, "body.query", "is empty"),
    ({"query": HALF_PAIR}, "body.query", "surrogate"),
    ({"query": ["q"]}, "body.query", "text"),
    ({"documents": []}, "body.documents", "is empty"),
    ({"documents": "d"}, "body.documents", "list"),
    ({"documents": ["d", ""]}, "body.documents", "document 1 is empty"),
    ({"documents": [{"text": ""}]}, "body.documents", "document 0 is empty"),
    ({"documents": [{"title": "d"}]}, "body.documents", "document 0"),
    ({"documents": [HALF_PAIR]}, "body.documents", "surrogate"),
    ({"documents": ["d"] * 10_001}, "body.documents", "at most 10000"),
    ({"top_n": 0}, "body.top_n", "give an integer from 1 to 2147483647"),
    ({"return_documents": "yes"}, "body.return_documents", "true or false"),
]


@pytest.mark.parametrize(("given", "param", "said"), BAD_COMPLETIONS)
def test_bad_completions(given: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(BodyError) as caught:
        completion(**given)
    assert caught.value.param == param
    assert said in caught.value.message


@pytest.mark.parametrize(("given", "param", "said"), BAD_RERANKS)
def test_bad_reranks(given: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(BodyError) as caught:
        rerank(**given)
    assert caught.value.param == param
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"best_of": 3}, "body.best_of"),
        ({"best_of": 3, "n": 2}, "body.best_of"),
        ({"use_beam_search": True}, "body.use_beam_search"),
        ({"echo": True}, "body.echo"),
        ({"suffix": "end"}, "body.suffix"),
        ({"stream": True}, "body.stream"),
        ({"prompt": ["one", "two"]}, "body.prompt"),
        ({"prompt": [[1], [2]]}, "body.prompt"),
    ],
)
def test_what_would_change_the_answer_is_refused(given: dict[str, Any], param: str) -> None:
    with pytest.raises(BodyError) as caught:
        completion(**given)
    assert (caught.value.code, caught.value.param) == ("unsupported", param)


def test_a_misspelt_field_is_refused_with_a_suggestion() -> None:
    with pytest.raises(BodyError, match="did you mean 'max_tokens'") as caught:
        completion(max_token=3)
    assert caught.value.code == "unsupported"


def test_a_strange_field_name_is_made_harmless() -> None:
    with pytest.raises(BodyError) as caught:
        completion(**{"a\x00\ud800{b}" + "x" * 100: 1})
    assert caught.value.param is not None
    assert caught.value.param.startswith("body.a\\x00\\ud800{b}")
    assert len(caught.value.param) < 80


@pytest.mark.parametrize("kind", list(RequestKind))
def test_missing_fields(kind: RequestKind) -> None:
    with pytest.raises(BodyError) as caught:
        validate_body(kind, {})
    assert caught.value.code == "missing_field"
    assert caught.value.param in {"body.prompt", "body.query"}


def test_texts_never_appear_in_messages() -> None:
    secret = "a secret of the house"
    bad: list[dict[str, Any]] = [
        {"prompt": {"text": secret}},
        {"prompt": [secret, secret]},
        {"prompt": secret, "max_tokens": secret},
        {"prompt": secret, "stop": [secret, ""]},
        {"prompt": secret, "user_prompt": secret},
    ]
    for body in bad:
        with pytest.raises(BodyError) as caught:
            validate_body(RequestKind.GENERATE, body)
        assert secret not in caught.value.message


def chat(**fields):
    return validate_body(
        RequestKind.GENERATE, {"messages": [{"role": "user", "content": "hi"}], **fields}, chat=True
    )


def test_a_chat_body_is_messages_and_the_fields_of_a_completion():
    body = chat(temperature=0, stop="\n", user="me")
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert (body["temperature"], body["stop"], body["max_tokens"]) == (0, ["\n"], 256)
    shared = validate_body(RequestKind.GENERATE, {"prompt": "hi"}).keys() - {"prompt"}
    assert body.keys() == shared | {"messages", "chat_template_kwargs"}


def test_a_message_may_come_in_parts():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": "kim", "tool_calls": None}]
    assert chat(messages=messages)["messages"] == [
        {"role": "user", "content": "a b", "name": "kim"}
    ]


def test_the_chat_apis_name_of_max_tokens():
    assert chat(max_completion_tokens=7)["max_tokens"] == 7
    assert chat(max_completion_tokens=7, max_tokens=7)["max_tokens"] == 7
    assert chat(max_completion_tokens=None, max_tokens=8)["max_tokens"] == 8


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": None}, "body.messages", "is missing"),
        ({"messages": []}, "body.messages", "is empty"),
        ({"messages": "hi"}, "body.messages", "must be a list"),
        ({"messages": ["hi"]}, "body.messages", "message 0 needs a role"),
        ({"messages": [{"role": "", "content": "a"}]}, "body.messages", "message 0 needs a role"),
        ({"messages": [{"role": "user"}]}, "body.messages", "message 0: content must be a text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "body.messages",
            "message 0: content must be a text",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]},
            "body.messages",
            "calls of tools",
        ),
        (
            {"messages": [{"role": "user", "content": "\ud83d"}]},
            "body.messages",
            "half of a surrogate pair",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "name": 3}]},
            "body.messages",
            "name must be a text",
        ),
        ({"messages": [{"role": "user", "content": "a"}] * 10_001}, "body.messages", "10001"),
        ({"prompt": "hi"}, "body.prompt", "is not a field of this request"),
        ({"tools": [{"type": "function"}]}, "body.tools", "not supported"),
        ({"max_completion_tokens": 0}, "body.max_tokens", "greater than or equal to 1"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "body.max_tokens", "means the same"),
        ({"chat_template_kwargs": [1]}, "body.chat_template_kwargs", "must be an object"),
        (
            {"chat_template_kwargs": {"messages": []}},
            "body.chat_template_kwargs",
            "'messages' is not for the request to set",
        ),
        (
            {"chat_template_kwargs": {"mood": [{"level": math.inf}]}},
            "body.chat_template_kwargs",
            "give a finite number",
        ),
        (
            {"chat_template_kwargs": {"mood": ["\ud83d"]}},
            "body.chat_template_kwargs",
            "half of a surrogate pair",
        ),
        (
            {"chat_template_kwargs": {"mood": {"\ud83d": 1}}},
            "body.chat_template_kwargs",
            "half of a surrogate pair",
        ),
        (
            {"chat_template_kwargs": nested(34)},
            "body.chat_template_kwargs",
            "nested deeper than 32 levels",
        ),
    ],
)
def test_what_a_chat_body_refuses(fields, param, words):
    with pytest.raises(BodyError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert words in caught.value.message


def test_a_ranking_holds_ten_thousand_documents_and_no_more() -> None:
    assert len(rerank(documents=["d"] * 10_000)["documents"]) == 10_000
    with pytest.raises(BodyError, match="holds 10001 documents"):
        rerank(documents=["d"] * 10_001)
