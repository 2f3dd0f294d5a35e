"""Rendering: templates, preparing, the kinds of requests, and rows that cannot become one."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.records import NewRequest, RejectedRow
from nightjar.jobs.states import RequestKind
from nightjar.pipeline.tasks.errors import TaskError
from tests.tasks import PROMPT, prompts, rendered, write_rows, write_task

REVIEWS: dict[str, Any] = {"id": [1, 2, 3], "review": ["a", None, "c"], "stars": [1.5, 2, None]}


def render(folder: Path, request: str, columns: dict[str, Any] = REVIEWS, **task: Any) -> list[str]:
    write_rows(folder, columns)
    return prompts(rendered(write_task(folder, request, **task)))


def refused(folder: Path, request: str, columns: dict[str, Any] = REVIEWS, **task: Any) -> str:
    with pytest.raises(TaskError) as raised:
        render(folder, request, columns, **task)
    return str(raised.value)


def test_a_row_becomes_a_request_or_a_rejected_row(tmp_path: Path) -> None:
    write_rows(tmp_path, REVIEWS)
    first, second, third = rendered(
        write_task(
            tmp_path, 'prompt = "{{{stars}}} {review}\\n"', more="[parameters]\nmax_tokens=3"
        )
    )
    assert isinstance(first, NewRequest)
    assert (first.index, first.line, first.custom_id) == (0, 1, "[1]")
    assert first.kind is RequestKind.GENERATE
    assert (first.body["prompt"], first.body["max_tokens"]) == ("{1.5} a\n", 3)
    assert isinstance(second, RejectedRow)
    assert (second.line, second.custom_id, second.code) == (2, "[2]", "invalid_row")
    assert second.message.startswith("line 2, column 'review': is null; give it a value")
    assert isinstance(third, RejectedRow)
    assert "column 'stars': is null" in third.message


def test_every_single_value_has_a_text(tmp_path: Path) -> None:
    columns = {
        "id": [1],
        "n": [7],
        "yes": [True],
        "day": pa.array([20_000], pa.date32()),
        "at": pa.array([0], pa.timestamp("s")),
        "price": pa.array(["1.50"]).cast(pa.decimal128(5, 2)),
        "이름": ["값"],
    }
    request = 'prompt = "{n} {yes} {day} {at} {price} {이름}"'
    assert render(tmp_path, request, columns) == ["7 true 2024-10-04 1970-01-01T00:00:00 1.50 값"]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ('"{reviw}"', "no column 'reviw'; did you mean 'review'? The source has id, review, stars"),
        ('"{review.__class__}"', "reaches into the column 'review'"),
        ('"{review[0]}"', "reaches into the column 'review'"),
        ('"{review!r}"', "has a format"),
        ('"{stars:.1f}"', "has a format"),
        ('"{review"', "write {{ and }} for braces"),
        ('"{}"', "{} names no column"),
        ("{jinja = '{{ review.__class__ }}'}", "reaches into __class__"),
        ("{jinja = '{% if review %}'}", "the jinja template is not valid"),
        ("{jinja = '{{ reviw }}'}", "no column 'reviw'"),
        ("{jinja = '{% include \"/etc/passwd\" %}'}", "loads another one"),
    ],
)
def test_a_template_is_checked_before_any_row(tmp_path: Path, prompt: str, said: str) -> None:
    assert said in refused(tmp_path, f"prompt = {prompt}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 1000000000 }}",
        "{{ 9 ** 64 ** 64 }}",
        "{% for i in range(99999) %}{{ review }}{{ long }}{% endfor %}",
        "{{ review['__class__'].mro() }}",
        "{{ review.nothing }}",
        "{{ stars / 0 }}",
        "{{ none }}",
    ],
)
def test_jinja_that_fails_costs_its_row(tmp_path: Path, template: str) -> None:
    columns = {"id": [1], "review": ["a"], "stars": [1.0], "long": ["a" * 50]}
    (told,) = render(tmp_path, f'prompt = {{jinja = "{template}"}}', columns)
    assert told.startswith("line 1: the jinja template ")


@pytest.mark.parametrize(
    "loops",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}x",
        "{% macro m() %}{% for j in range(99999) %}{% endfor %}{% endmacro %}"
        "{% for i in range(9999) %}{{ m() }}{% endfor %}",
    ],
)
def test_loops_within_loops_have_a_bound(tmp_path: Path, loops: str) -> None:
    columns = {"id": [1], "review": ["a"]}
    (told,) = render(tmp_path, f'prompt = {{jinja = "{loops}"}}', columns)
    assert "turn more than 1000000 times" in told


def test_jinja_loops_over_a_list(tmp_path: Path) -> None:
    columns = {"id": [1], "tags": [[{"name": "a", "n": 1}, {"name": "b", "n": 2}]], "x": ["y"]}
    request = (
        "prompt = {jinja = '{% for t in tags %}{{ t.name }}{{ t.n * 2 }};{% endfor %}{{ x }}'}"
    )
    assert render(tmp_path, request, columns) == ["a2;b4;y"]


def test_columns_are_filled_cleaned_and_cropped_in_this_order(tmp_path: Path) -> None:
    columns = {"id": [1, 2], "review": ["  ﬁne \n day ", None]}
    request = """
prompt = "{review}"
defaults = {review = "  none at  all"}
clean = {review = ["strip", "collapse", "nfkc"]}
crop = {column = "review", characters = 6, keep = "end"}
"""
    assert render(tmp_path, request, columns) == ["ne day", "at all"]


def test_a_text_is_cropped_to_tokens_of_the_model(
    tmp_path: Path, directory: ModelDirectory
) -> None:
    texts = ["hello world, this is a long text " * 3, "안녕하세요 여러분 " * 9, "short", ""]
    write_rows(tmp_path, {"id": [1, 2, 3, 4], "review": texts})
    tokenizer = directory.tokenizer()
    for keep in ("start", "end"):
        crop = f'crop = {{column = "review", tokens = 7, keep = "{keep}"}}'
        task = write_task(tmp_path, f'prompt = "{{review}}|"\n{crop}')
        found = [text.removesuffix("|") for text in prompts(rendered(task, directory))]
        assert found[2:] == ["short", ""]
        for whole, part in zip(texts[:2], found[:2], strict=True):
            assert whole.startswith(part) if keep == "start" else whole.endswith(part)
            assert 4 <= len(tokenizer.encode(part)) <= 7
    with pytest.raises(TaskError, match="tokens need the model's directory"):
        rendered(task)


@pytest.mark.parametrize("kind", ["generate", "rank", "score"])
def test_a_request_is_cropped_to_the_context(
    tmp_path: Path, directory: ModelDirectory, kind: str
) -> None:
    text = "hello world, this is a long text. " * 40
    write_rows(tmp_path, {"id": [1, 2], "t": [text, "short"], "docs": [["a", text], ["b"]]})
    request = {
        "generate": 'prompt = "Say: {t}"\ncrop = {column = "t", tokens = "context"}',
        "score": 'prompt = "Say: {t}"\ntext = " yes"\ncrop = {column = "t", tokens = "context"}',
        "rank": 'query = "short"\ndocuments = {column = "docs"}\n'
        'crop = {column = "docs", tokens = "context", keep = "end"}',
    }[kind]
    more = "[parameters]\nmax_tokens = 20" if kind == "generate" else ""
    rows = rendered(write_task(tmp_path, request, kind=kind, more=more), directory)
    context, tokenizer = directory.config.context_length, directory.tokenizer()
    lengths = []
    for row in rows:
        assert isinstance(row, NewRequest)
        texts = [row.body["prompt"]] if kind == "generate" else [row.body["query"]]
        texts.append(max(row.body.get("documents", [""]), key=len))
        length = sum(len(tokenizer.encode(one)) for one in texts)
        lengths.append(length + row.body.get("max_tokens", 0))
    assert context - 4 <= lengths[0] <= context
    assert lengths[1] < 40


def test_messages_of_templates_and_of_columns(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hi"}]
    columns = {"id": [1, 2, 3], "q": ["x", "y", "z"], "said": [said, [], None]}
    write_rows(tmp_path, columns)
    messages = 'messages = [{role = "system", content = "s"}, {role = "user", content = "{q}?"}]'
    first, *_ = rendered(write_task(tmp_path, messages, kind="chat"))
    assert isinstance(first, NewRequest)
    assert [one["content"] for one in first.body["messages"]] == ["s", "x?"]
    first, second, third = rendered(
        write_task(tmp_path, 'messages = {column = "said"}', kind="chat")
    )
    assert isinstance(first, NewRequest)
    assert first.body["messages"] == said
    assert isinstance(second, RejectedRow)
    assert second.message.startswith("line 2, column 'said': messages: is empty")
    assert isinstance(third, RejectedRow)
    write_rows(tmp_path, {"id": [1, 2], "said": ['[{"role": "user", "content": "hi"}]', "hello"]})
    first, second = rendered(write_task(tmp_path, 'messages = {column = "said"}', kind="chat"))
    assert isinstance(first, NewRequest)
    assert first.body["messages"] == said
    assert isinstance(second, RejectedRow)
    assert "is not JSON" in second.message


def test_lists_of_documents(tmp_path: Path) -> None:
    documents = [["a", "b"], [], ["x"] * 10_000, ["x"] * 10_001, ["a", None], None]
    write_rows(tmp_path, {"id": list("abcdef"), "user": ["u"] * 6, "docs": documents})
    request = 'query = "{user}"\ndocuments = {column = "docs"}'
    good, empty, most, many, hole, null = rendered(write_task(tmp_path, request, kind="rank"))
    assert isinstance(good, NewRequest)
    assert (good.custom_id, good.kind) == ("a", RequestKind.RANK)
    assert (good.body["query"], good.body["documents"]) == ("u", ["a", "b"])
    assert isinstance(most, NewRequest)
    told = [row.message for row in (empty, many, hole, null) if isinstance(row, RejectedRow)]
    assert "line 2, column 'docs': documents: is empty; give at least one" in told[0]
    assert "holds 10001 documents; give at most 10000" in told[1]
    assert "document 1 must be a text" in told[2]
    assert "column 'docs': is null" in told[3]


def test_documents_of_structs(tmp_path: Path) -> None:
    items = [[{"title": "t", "price": 3}], [{"title": None, "price": 3}]]
    write_rows(tmp_path, {"id": [1, 2], "docs": items})
    request = 'query = "q"\ndocuments = {column = "docs", each = "{title} ({price})"}'
    first, second = rendered(write_task(tmp_path, request, kind="rank"))
    assert isinstance(first, NewRequest)
    assert first.body["documents"] == ["t (3)"]
    assert isinstance(second, RejectedRow)
    assert "column 'docs': document 0, title: is null" in second.message
    columns = {"id": [1], "docs": [items[0]], "text": ["x"], "numbers": [[1]]}
    told = refused(tmp_path, 'query = "q"\ndocuments = {column = "docs"}', columns, kind="rank")
    assert 'each = "{title}"' in told
    each = 'query = "q"\ndocuments = {column = "docs", each = "{name}"}'
    assert "there is no 'name'; there are title, price" in refused(
        tmp_path, each, columns, kind="rank"
    )
    for name in ("text", "numbers"):
        told = refused(
            tmp_path, f'query = "q"\ndocuments = {{column = "{name}"}}', columns, kind="rank"
        )
        assert f"the column '{name}' holds" in told


def test_a_score_is_a_ranking_of_one_document(tmp_path: Path) -> None:
    write_rows(tmp_path, {"id": [1], "q": ["Q"], "a": ["A"]})
    (row,) = rendered(write_task(tmp_path, 'prompt = "{q}:"\ntext = " {a}"', kind="score"))
    assert isinstance(row, NewRequest)
    assert row.kind is RequestKind.RANK
    assert (row.body["query"], row.body["documents"]) == ("Q:", [" A"])


def test_parameters_of_columns(tmp_path: Path) -> None:
    columns = {
        "id": [1, 2, 3],
        "review": ["a"] * 3,
        "most": [5, None, 0],
        "vector": ["v", None, ""],
    }
    more = '[parameters]\nmax_tokens = {column = "most"}\ntemperature = 0'
    request = f"{PROMPT}"
    write_rows(tmp_path, columns)
    first, second, third = rendered(write_task(tmp_path, request, more=more))
    assert isinstance(first, NewRequest)
    assert isinstance(second, NewRequest)
    assert (first.body["max_tokens"], second.body["max_tokens"]) == (5, 16)
    assert isinstance(third, RejectedRow)
    assert third.message.startswith("line 3, column 'most': max_tokens: ")
    assert (third.code, third.param) == ("invalid_value", "body.max_tokens")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[parameters]\nmax_tokens = 0", "[parameters] max_tokens: "),
        ("[parameters]\nmax_token = 1", "is no parameter of kind 'generate'"),
        ('[parameters]\nprompt = "x"', "is no parameter of kind 'generate'"),
        ('[parameters]\nmax_tokens = {column = "most"}', "no column 'most'"),
        ("[parameters]\nn = 2\ntemperature = 0", "[parameters] n: is 2 with temperature 0"),
    ],
)
def test_parameters_are_checked_before_any_row(tmp_path: Path, more: str, said: str) -> None:
    assert said in refused(tmp_path, PROMPT, more=more)


@pytest.mark.parametrize(
    ("request_", "columns", "said"),
    [
        (PROMPT, {"id": [1], "review": [["a"]]}, "holds lists of texts, which is no single text"),
        (PROMPT, {"id": [1], "review": [{"a": 1}]}, "holds structs, which is no single text"),
        (PROMPT, {"id": [1], "review": [b"a"]}, "decode it into a column of texts"),
        (PROMPT, {"id": [1.5], "review": ["a"]}, "[source] key: the key column id"),
        (PROMPT, {"no": [1], "review": ["a"]}, "[source] key: the source has no column 'id'"),
        (f"{PROMPT}\ndefaults = {{id = 'x'}}", REVIEWS, "defaults: the column 'id' holds whole"),
        (f"{PROMPT}\nclean = {{id = ['strip']}}", REVIEWS, "holds whole numbers, no texts"),
        (f"{PROMPT}\nclean = {{no = ['strip']}}", REVIEWS, "[request] clean: the source has no"),
    ],
)
def test_columns_are_checked_before_any_row(
    tmp_path: Path, request_: str, columns: dict[str, Any], said: str
) -> None:
    assert said in refused(tmp_path, request_, columns)


def test_rows_without_a_key_are_rejected_and_the_others_go_on(tmp_path: Path) -> None:
    columns = {"a": ["x", None, "z"], "b": [1, 2, 3], "review": ["r"] * 3}
    write_rows(tmp_path, columns)
    rows = rendered(write_task(tmp_path, key='["a", "b"]'))
    assert [row.custom_id for row in rows] == ['["x",1]', None, '["z",3]']
    assert [type(row) for row in rows] == [NewRequest, RejectedRow, NewRequest]
    assert prompts(rows)[1] == "line 2, column 'a': is null; every row needs a key"
    columns = {"id": ["", "k" * 600, "ok"], "review": ["r"] * 3}
    write_rows(tmp_path, columns)
    rows = rendered(write_task(tmp_path))
    assert [row.custom_id for row in rows] == [None, None, "ok"]


def content_keys(folder: Path, request: str = PROMPT, **changes: Any) -> list[str]:
    columns = {"id": [1, 2], "review": ["a", "b"], "day": ["Mon", "Mon"], "tags": [["x"], None]}
    write_rows(folder, columns | changes)
    task = write_task(folder, request, key='["id"]\ncontent = ["review", "tags"]')
    rows = rendered(task)
    return [row.body["content_key"] for row in rows if isinstance(row, NewRequest)]


def test_the_columns_of_the_content_say_whether_a_row_has_changed(tmp_path: Path) -> None:
    dated = 'prompt = "{day}: {review}"'
    before = content_keys(tmp_path, dated)
    assert len(set(before)) == 2
    assert content_keys(tmp_path, dated, day=["Tue", "Tue"], id=[8, 9]) == before
    assert content_keys(tmp_path, dated, review=["a", "c"])[0] == before[0]
    assert content_keys(tmp_path, dated, review=["a", "c"])[1] != before[1]
    assert content_keys(tmp_path, dated, tags=[["x"], []])[1] != before[1]
    assert not set(content_keys(tmp_path, 'prompt = "{day}, {review}"')) & set(before)
    odd = {"review": ["a", "b"], "tags": pa.array([1, None], pa.timestamp("ns"))}
    assert len(set(content_keys(tmp_path, dated, **odd))) == 2
    columns = {"id": [1], "review": ["a"]}
    told = refused(tmp_path, PROMPT, columns, key='["id"]\ncontent = ["reviw"]')
    assert "[source] content: the source has no column 'reviw'; did you mean 'review'?" in told
    with pytest.raises(TaskError, match="content names a column twice"):
        rendered(write_task(tmp_path, key='["id"]\ncontent = ["review", "review"]'))
    assert rendered(write_task(tmp_path))[0].body["content_key"] is None  # type: ignore[union-attr]
