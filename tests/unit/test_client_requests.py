"""Typed requests and dictionaries: which lines become of them, and what is refused."""

import json
import tracemalloc
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightjar import Chat, Generate, Rank, RequestError
from nightjar.jobs.lines.parsing import CHAT_URL, parse_batch_line, validate_body
from nightjar.jobs.records import NewRequest
from nightjar.jobs.states import RequestKind
from nightjar.pipeline.client.connecting import opened
from nightjar.pipeline.client.options import SubmitOptions
from nightjar.pipeline.client.sources import Lines, one_or_many
from nightjar.pipeline.client.uploads import Spool

HELLO = [{"role": "user", "content": "hello"}]


def lines(*rows: Any, **options: Any) -> list[dict[str, Any]]:
    given: SubmitOptions = options  # type: ignore[assignment]
    return [json.loads(line) for line in Lines(given).of(rows)]


def test_a_request_becomes_a_line_with_what_was_given() -> None:
    made = lines(
        Generate(prompt="a", max_tokens=4, stop="\n", custom_id="밤"),
        Chat(messages=HELLO, logprobs=True, top_logprobs=2, max_completion_tokens=7),
        Rank(query="q", documents=["a", "b"], top_n=1),
    )
    assert made == [
        {
            "custom_id": "밤",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"max_tokens": 4, "stop": ["\n"], "prompt": "a"},
        },
        {
            "custom_id": "row-1",
            "method": "POST",
            "url": CHAT_URL,
            "body": {"messages": HELLO, "max_tokens": 7, "logprobs": True, "top_logprobs": 2},
        },
        {
            "custom_id": "row-2",
            "method": "POST",
            "url": "/v1/rerank",
            "body": {"query": "q", "documents": ["a", "b"], "top_n": 1},
        },
    ]


FIELDS = st.fixed_dictionaries(
    {"prompt": st.text("ab가", min_size=1, max_size=3)},
    optional={
        "max_tokens": st.integers(1, 50),
        "temperature": st.floats(0.1, 2),
        "top_k": st.integers(-1, 5),
        "stop": st.sampled_from(["x", ["x", "y"]]),
        "logit_bias": st.just({"5": 1.5}),
        "seed": st.integers(-5, 5),
        "logprobs": st.integers(0, 5),
        "n": st.integers(1, 3),
        "user": st.just("dropped"),
    },
)


@given(FIELDS)
def test_what_the_api_reads_of_a_request_is_what_was_given(fields: dict[str, Any]) -> None:
    (line,) = Lines({}).of([Generate(**fields)])
    read = parse_batch_line(line, 1, 0)
    assert isinstance(read, NewRequest)
    assert read.body == validate_body(RequestKind.GENERATE, fields)


def test_a_request_may_be_changed() -> None:
    request = Generate(prompt="a")
    request.max_tokens = 9
    copy = request.model_copy(update={"temperature": 0.5})
    assert request.body() == {"prompt": "a", "max_tokens": 9}
    assert copy.body() == {"prompt": "a", "max_tokens": 9, "temperature": 0.5}


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (Generate, {}, "Generate: prompt: is missing"),
        (Generate, {"prompt": "secret", "max_tokens": 0}, "max_tokens: .* from 1 to"),
        (Generate, {"prompt": "secret", "max_tokns": 1}, "did you mean 'max_tokens'"),
        (Generate, {"prompt": "secret", "temperature": float("nan")}, "temperature: "),
        (Generate, {"prompt": "secret", "custom_id": ""}, "custom_id: .*at least 1 character"),
        (Chat, {"messages": []}, "Chat: messages: "),
        (Rank, {"query": "secret"}, "Rank: documents: is missing"),
    ],
)
def test_a_bad_request_is_refused_when_it_is_made(
    kind: type[Generate | Chat | Rank], fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        kind(**fields)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_dictionaries_are_batch_lines_or_bodies() -> None:
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}}
    made = lines(
        whole,
        {"url": "/v1/completions", "body": {"prompt": "p"}},
        {"prompt": "p", "custom_id": 7, "temperature": None},
        {"messages": HELLO},
        {"query": "q", "documents": ["d"]},
        fields={"max_tokens": 3},
    )
    assert made[0] == {**whole, "body": {"max_tokens": 3, "prompt": "p"}}
    assert [line["custom_id"] for line in made] == ["a", "row-1", "7", "row-3", "row-4"]
    assert made[2]["body"] == {"max_tokens": 3, "prompt": "p"}
    assert [line["url"] for line in made[3:]] == [CHAT_URL, "/v1/rerank"]
    assert {line["method"] for line in made} == {"POST"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"promt": "a"}, "row 1: has neither prompt, messages, nor query"),
        ({"prompt": "a", "query": "b"}, "row 1: has prompt and query"),
        ({"prompt": date(2026, 1, 1)}, "row 1: prompt is of type date"),
        ({"prompt": "a", "temperature": float("inf")}, "row 1: temperature is inf"),
        ({"prompt": "\ud83d"}, "row 1: cannot be written as JSON: holds half of a surrogate"),
        ({"prompt": ["a", object()]}, "row 1: cannot be written as JSON: .*object"),
        ("prompt", "row 1: is of type str; give Generate"),
        (None, "row 1: is of type NoneType"),
    ],
)
def test_a_row_that_cannot_be_a_request_is_named(row: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        lines({"prompt": "good"}, row)


def test_a_template_takes_columns_and_nothing_else() -> None:
    rows = [{"id": 5, "review": "좋다", "n": 2}, {"id": None, "review": None, "n": 1}]
    made = lines(*rows, template="{{리뷰}}: {review} {n}\n평가:", id_column="id")
    assert [line["custom_id"] for line in made] == ["5", "row-1"]
    # The API rejects a row without its prompt alone, and says so.
    assert [line["body"] for line in made] == [{"prompt": "{리뷰}: 좋다 2\n평가:"}, {}]
    for row, said in (
        ({"id": 1, "reviw": "a", "n": 1}, "row 0: there is no column 'review'; .*'reviw'"),
        ({"key": 1, "review": "a", "n": 1}, "row 0: there is no column 'id'"),
    ):
        with pytest.raises(RequestError, match=said):
            lines(row, template="{review} {n}", id_column="id")
    for template, said in (
        ("{review.__class__}", "more than the name of a column"),
        ("{review[0]}", "more than the name of a column"),
        ("{review!r}", "more than the name of a column"),
        ("{review:>9}", "more than the name of a column"),
        ("{}", "more than the name of a column"),
        ("{review", "expected '}'"),
        ("no column", "names no column"),
    ):
        with pytest.raises(RequestError, match=said):
            lines({"review": "a"}, template=template)


def test_one_request_is_a_source_and_a_text_is_none() -> None:
    request = Generate(prompt="a")
    assert one_or_many(request) == [request]
    assert one_or_many({"prompt": "a"}) == [{"prompt": "a"}]
    for source in (b"bytes", 5):
        with pytest.raises(RequestError, match="give a path, a frame"):
            one_or_many(source)  # type: ignore[arg-type]


def test_rows_are_written_in_bounded_memory() -> None:
    rows = ({"prompt": f"{n} {'x' * 1_000}"} for n in range(30_000))
    tracemalloc.start()
    with opened(rows, {}) as upload:
        size = upload.size
        assert sum(map(len, upload.pieces())) == size
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 30_000_000
    assert peak < 10_000_000


def test_an_iterator_is_read_once_and_no_more_than_fits() -> None:
    def requests() -> Iterator[Generate]:
        for n in range(100):
            made.append(n)
            yield Generate(prompt=f"{n}")

    made: list[int] = []
    with Spool(most_bytes=1_000) as spool, pytest.raises(RequestError, match="longer than 1000"):
        spool.write(Lines({}).of(requests()))
    assert len(made) < 20
    with Spool() as spool:
        spool.write(Lines({}).of(requests()))
        upload = spool.upload()
        once, again = b"".join(upload.pieces()), b"".join(upload.pieces())
    assert once == again
    assert (once.count(b"\n"), len(once)) == (100, upload.size)
