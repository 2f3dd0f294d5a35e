"""Frames of pandas, polars and pyarrow, in and out of the client."""

import json
from collections.abc import Callable
from datetime import date
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from nightjar import ClientError, RequestError, Result, RowError
from nightjar.pipeline.client import frames
from nightjar.pipeline.client.connecting import opened
from nightjar.pipeline.client.options import SubmitOptions
from nightjar.pipeline.client.records import Usage

Columns = dict[str, list[Any]]
KINDS: list[Callable[[Columns], Any]] = [pd.DataFrame, pl.DataFrame, pa.table]
each_kind = pytest.mark.parametrize("frame", KINDS, ids=["pandas", "polars", "pyarrow"])


def lines(source: Any, **options: Any) -> list[dict[str, Any]]:
    given: SubmitOptions = options  # type: ignore[assignment]
    with opened(source, given) as upload:
        return [json.loads(line) for line in b"".join(upload.pieces()).splitlines()]


@each_kind
def test_columns_are_request_fields(frame: Callable[[Columns], Any]) -> None:
    made = lines(
        frame({"custom_id": [7, 8], "prompt": ["가", None], "max_tokens": [4, 5]}),
        fields={"temperature": 0, "max_tokens": 1},
    )
    assert [line["custom_id"] for line in made] == ["7", "8"]
    assert [line["body"] for line in made] == [
        {"temperature": 0, "max_tokens": 4, "prompt": "가"},
        {"temperature": 0, "max_tokens": 5},  # the API rejects this row alone
    ]


@each_kind
def test_a_ranking_and_a_template(frame: Callable[[Columns], Any]) -> None:
    ranked = frame({"user": ["u1"], "query": ["q"], "documents": [["a", "b"]], "top_n": [1]})
    (line,) = lines(ranked, id_column="user")
    assert (line["custom_id"], line["url"]) == ("u1", "/v1/rerank")
    assert line["body"] == {"query": "q", "documents": ["a", "b"], "top_n": 1}
    told = frame({"day": [date(2026, 1, 2)] * 2_500, "n": list(range(2_500))})
    made = lines(told, template="{day} {n}", fields={"n": 2})
    assert len(made) == 2_500
    assert made[-1]["body"] == {"n": 2, "prompt": "2026-01-02 2499"}


@each_kind
def test_columns_that_cannot_be_used_are_named(frame: Callable[[Columns], Any]) -> None:
    for columns, options, said in (
        ({"promt": ["a"]}, {}, "neither prompt, messages, nor query"),
        ({"prompt": ["a"], "maxtokens": [1]}, {}, "'maxtokens' .*did you mean 'max_tokens'"),
        ({"review": ["a"]}, {"template": "{reviw}"}, "no column 'reviw'; did you mean 'review'"),
        ({"prompt": ["a"]}, {"id_column": "key"}, "there is no column 'key'"),
        ({"prompt": ["a"], "seed": [date(2026, 1, 2)]}, {}, "row 0: seed is of type date"),
    ):
        with pytest.raises(RequestError, match=said):
            lines(frame(columns), **options)


def test_results_become_typed_columns() -> None:
    table = frames.ResultTable()
    assert table.arrow().num_rows == 0
    table.add([Result("a", text="hi", finish_reason="stop", usage=Usage(3, 2, 5))])
    table.add(
        [
            Result("b", scores=(0.5, None, 0.25), ranking=(0, 2)),
            Result(None, error=RowError("missing_field", "prompt: is missing")),
        ]
    )
    found = table.arrow()
    assert found.column("scores").to_pylist() == [None, [0.5, None, 0.25], None]
    assert found.column("ranking").to_pylist() == [None, [0, 2], None]
    assert table.pandas()["text"].tolist()[0] == "hi"
    frame = table.polars()
    assert frame.columns == [
        *("custom_id", "text", "finish_reason", "scores", "ranking"),
        *("prompt_tokens", "completion_tokens", "error_code", "error_message"),
    ]
    assert frame["error_code"].to_list() == [None, None, "missing_field"]
    assert frame["completion_tokens"].to_list() == [2, None, None]


def test_a_missing_package_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ClientError, match=r"frames need pyarrow: pip install 'nightjar-batch"):
        frames.ResultTable()
