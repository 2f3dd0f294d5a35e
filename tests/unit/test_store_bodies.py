"""Stored bodies: short, and whole again when they are read."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightjar.jobs.lines.parsing import BodyError, validate_body
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store.bodies import _GENERATE, _RANK, dump_body, load_body
from nightjar.jobs.store.json_text import dump_json

GENERATE, RANK = RequestKind.GENERATE, RequestKind.RANK
SHORTEST: list[tuple[RequestKind, bool, dict[str, Any]]] = [
    (GENERATE, False, {"prompt": "a"}),
    (GENERATE, True, {"messages": [{"role": "user", "content": "a"}]}),
    (RANK, False, {"query": "a", "documents": ["b"]}),
]

settings = st.fixed_dictionaries(
    {"prompt": st.text(min_size=1, alphabet=st.characters(exclude_categories=["Cs"]))},
    optional={
        "max_tokens": st.integers(1, 100),
        "temperature": st.sampled_from([0, 0.0, 1, 1.0, 0.7]),
        "top_p": st.sampled_from([1, 1.0, 0.5]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": st.sampled_from(["x", ["x", "y"]]),
        "logit_bias": st.sampled_from([{}, {"5": 1.5}]),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 20),
        "bad_words": st.sampled_from([[], ["no"]]),
        "n": st.just(1),
        "model": st.text(min_size=1, max_size=5, alphabet="abc"),
    },
)


@given(settings)
def test_a_validated_body_comes_back(given_body: dict[str, Any]) -> None:
    body = validate_body(GENERATE, given_body)
    found = load_body(dump_body(body))
    assert found == body
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in body.items()
    }


any_text = st.text(st.characters(), max_size=4)
variables = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(any_text, variables, max_size=3))
def test_a_templates_variables_are_refused_or_come_back(given: dict[str, Any]) -> None:
    """Whatever JSON can hold: what could not be stored would take its whole job with it."""
    chat = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": given}
    try:
        body = validate_body(GENERATE, chat, chat=True)
    except BodyError as refusal:
        blamed = refusal.param
    else:
        blamed = None
        assert load_body(dump_body(body))["chat_template_kwargs"] == given
    assert blamed in (None, "body.chat_template_kwargs")


@pytest.mark.parametrize(("kind", "chat", "given_body"), SHORTEST)
def test_defaults_are_not_stored(kind: RequestKind, chat: bool, given_body: dict[str, Any]) -> None:
    """A field that is new in the schemas belongs in the table, too, or is stored with every row."""
    body = validate_body(kind, given_body, chat=chat)
    stored = json.loads(dump_body(body))
    assert stored.keys() - given_body.keys() <= {"max_tokens", "chat_template_kwargs"}
    assert load_body(dump_body(body)) == body


@pytest.mark.parametrize("body", [body for _, _, body in SHORTEST])
def test_rows_of_today_are_read_alike_for_ever(body: dict[str, Any]) -> None:
    """Written out, so that no default can change under the rows that rely on it."""
    every = {"model": None, "prompt_vector": None, "adapter": None, "content_key": None}
    rank = {**every, "top_n": None, "return_documents": False}
    generate = {
        **every,
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
    usual = rank if "query" in body else generate
    assert load_body(json.dumps(body)) == usual | body


def test_what_is_stored_whole_is_read_as_it_stands() -> None:
    """Rows that an earlier version has written."""
    whole = dict(_GENERATE) | {"prompt": "a", "max_tokens": 5, "top_p": 0.5}
    assert load_body(json.dumps(whole)) == whole
    ranking = dict(_RANK) | {"query": "a", "documents": ["b"], "top_n": 1}
    assert load_body(json.dumps(ranking)) == ranking


def test_what_equals_a_default_but_is_not_the_same_is_stored() -> None:
    assert json.loads(dump_body({"prompt": "a", "n": True, "top_p": 1})) == {
        "prompt": "a",
        "n": True,
        "top_p": 1,
    }


def test_text_is_stored_as_it_is_read() -> None:
    """Escaped, a Korean text would take twice the bytes."""
    assert dump_json({"a": "밤"}) == '{"a":"밤"}'
    beside_a_large_integer = dump_json({"a": "밤", "n": 2**70})
    assert beside_a_large_integer == f'{{"a":"밤","n":{2**70}}}'
