"""From the bytes of a line to a request or a rejection."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from nightjar.jobs.lines.bodies import ChatBody, CompletionBody, RerankBody
from nightjar.jobs.lines.parsing import _decode_json, _Line, parse_batch_line, validate_body
from nightjar.jobs.records import NewRequest, RejectedRow
from nightjar.jobs.states import RequestKind


def line(**changes: Any) -> bytes:
    """A good line with some fields changed; None removes a field."""
    data = {
        "custom_id": "row-1",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "hi"},
        **changes,
    }
    return json.dumps({key: value for key, value in data.items() if value is not None}).encode()


def rejected(raw: bytes) -> RejectedRow:
    row = parse_batch_line(raw, line=17, index=16)
    assert isinstance(row, RejectedRow)
    assert (row.line, row.index) == (17, 16)
    assert row.message.startswith("line 17")
    return row


def test_a_good_line() -> None:
    row = parse_batch_line(line(), line=3, index=2)
    assert isinstance(row, NewRequest)
    assert (row.index, row.line, row.custom_id) == (2, 3, "row-1")
    assert row.kind is RequestKind.GENERATE
    assert row.body["prompt"] == "hi"


def test_both_kinds() -> None:
    body = {"query": "q", "documents": ["d"]}
    row = parse_batch_line(line(url="/v1/rerank", body=body), line=1, index=0)
    assert isinstance(row, NewRequest)
    assert row.kind is RequestKind.RANK


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionBody, {"prompt": "hi", "best_of": 1, "logit_bias": {"5": 1}, "stop": "a"}),
        (CompletionBody, {"prompt": [1, 2], "top_k": -1, "temperature": 0, "beam_width": 2}),
        (ChatBody, {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 3}),
        (RerankBody, {"query": "q", "documents": ["d", {"text": "e"}], "top_n": 1}),
    ],
)
def test_a_validated_body_is_what_pydantic_would_write(
    model: type[BaseModel], body: dict[str, Any]
) -> None:
    kind = RequestKind.RANK if model is RerankBody else RequestKind.GENERATE
    found = validate_body(kind, body, chat=model is ChatBody)
    written = model.model_validate(body).model_dump()
    assert found == written
    assert json.dumps(found, sort_keys=True) == json.dumps(written, sort_keys=True)


def test_unknown_fields_beside_the_body_are_passed_over() -> None:
    assert isinstance(parse_batch_line(line(note="mine"), 1, 0), NewRequest)


def test_a_byte_order_mark_is_skipped_on_the_first_line_alone() -> None:
    assert isinstance(parse_batch_line(b"\xef\xbb\xbf" + line(), 1, 0), NewRequest)
    assert rejected(b"\xef\xbb\xbf" + line()).code == "invalid_json"


@pytest.mark.parametrize(
    ("raw", "code", "said"),
    [
        (b'{"custom_id": "row-1", "method"', "invalid_json", "column 32"),
        (b"[1]", "invalid_json", "not a JSON object"),
        (b"null", "invalid_json", "not a JSON object"),
        (b"[" * 100_000, "invalid_json", "nested too deeply"),
        (b'{"custom_id": ' + b"1" * 5_000 + b"}", "invalid_json", "too many digits"),
        (b'{"custom_id": "\xff"}', "invalid_encoding", "byte 16"),
        (b'{"x": NaN, "broken', "invalid_json", "NaN"),
    ],
)
def test_lines_that_cannot_be_read(raw: bytes, code: str, said: str) -> None:
    row = rejected(raw)
    assert (row.code, row.custom_id, row.param) == (code, None, None)
    assert said in row.message


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_lacks(constant: str) -> None:
    row = rejected(line(body={"prompt": "a", "temperature": 7}).replace(b"7", constant.encode()))
    assert (row.code, row.custom_id) == ("invalid_json", "row-1")
    assert constant in row.message


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"custom_id": None}, "missing_field", "custom_id"),
        ({"method": None}, "missing_field", "method"),
        ({"url": None}, "missing_field", "url"),
        ({"body": None}, "missing_field", "body"),
        ({"custom_id": ""}, "invalid_value", "custom_id"),
        ({"custom_id": 5}, "invalid_value", "custom_id"),
        ({"custom_id": "a\x00"}, "invalid_value", "custom_id"),
        ({"custom_id": "\ud800"}, "invalid_value", "custom_id"),
        ({"method": "GET"}, "invalid_value", "method"),
        ({"url": "/v1/embeddings"}, "unsupported", "url"),
        ({"url": "/v1/chat/completions"}, "unsupported", "body.prompt"),
        ({"url": ["/v1/completions"]}, "unsupported", "url"),
        ({"body": [1]}, "invalid_value", "body"),
        ({"body": {}}, "missing_field", "body.prompt"),
        ({"body": {"prompt": "a", "max_tokens": 0}}, "invalid_value", "body.max_tokens"),
    ],
)
def test_bad_fields(changes: dict[str, Any], code: str, param: str) -> None:
    row = rejected(line(**changes))
    assert (row.code, row.param) == (code, param)
    assert row.message.startswith(f"line 17, {param}: ")
    assert row.custom_id == ("row-1" if "custom_id" not in changes else row.custom_id)


def test_a_custom_id_that_is_too_long_is_cut_in_the_rejection() -> None:
    row = rejected(line(custom_id="x" * 513))
    assert row.code == "invalid_value"
    assert row.custom_id == "x" * 512
    assert isinstance(parse_batch_line(line(custom_id="x" * 512), 1, 0), NewRequest)


def test_a_long_line_is_refused_before_it_is_read() -> None:
    raw = line()
    row = parse_batch_line(raw, 1, 0, max_bytes=len(raw) - 1)
    assert isinstance(row, RejectedRow)
    assert row.code == "line_too_long"
    assert isinstance(parse_batch_line(raw, 1, 0, max_bytes=len(raw)), NewRequest)


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode()))
def test_no_bytes_make_it_raise(raw: bytes) -> None:
    assert isinstance(parse_batch_line(raw, 17, 16), RejectedRow)


def json_of(floats: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none() | st.booleans() | st.integers() | floats | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=8,
    )


json_values = json_of(st.floats())
finite_values = json_of(st.floats(allow_nan=False, allow_infinity=False))


@given(
    st.dictionaries(
        st.text(max_size=5), finite_values | st.integers(-(10**30), 10**30), max_size=4
    ),
    st.booleans(),
)
@example({"a": 1e308, "b": -0.0, "c": 2**64, "d": "\ud800"}, True)
def test_lines_read_as_pythons_own_decoder_reads_them(value: dict[str, Any], plain: bool) -> None:
    raw = json.dumps(value, ensure_ascii=plain).encode(errors="replace")
    assert repr(_decode_json(raw, _Line(0, 1))) == repr(json.loads(raw))


body_fields = st.sampled_from(["prompt", "max_tokens", "stop", "top_k", "query", "documents", "n"])


@given(st.dictionaries(body_fields, json_values), st.sampled_from(["completions", "rerank"]))
def test_no_body_makes_it_raise(body: dict[str, Any], url: str) -> None:
    row = parse_batch_line(line(body=body, url=f"/v1/{url}"), 17, 16)
    if isinstance(row, NewRequest):
        json.dumps(row.body, allow_nan=False, ensure_ascii=False).encode()
    else:
        row.message.encode()
