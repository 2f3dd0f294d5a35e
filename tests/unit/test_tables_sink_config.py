"""The `[sink]` table of a task file: one target, and options that fit it."""

from typing import Any

import pytest
from pydantic import ValidationError

from nightjar.pipeline.tables.sinks.config import SinkConfig


@pytest.mark.parametrize(
    "given",
    [
        {"jsonl": "out.jsonl"},
        {"parquet": "s3://bucket/out.parquet", "compression": "gzip", "rows_per_group": 10},
        {"parquet": "out/", "partition_by": ["day"], "rows_per_file": 5, "errors": "bad/"},
        {"sql": {"url": "env:DB", "table": "a.b", "create": False, "mirror": True}},
    ],
)
def test_what_may_be_written(given: dict[str, Any]) -> None:
    config = SinkConfig.model_validate(given)
    assert config.keeps_errors == ("errors" not in given)
    assert config.is_folder == (given.get("parquet") == "out/")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "exactly one of jsonl, parquet and sql; found none"),
        ({"jsonl": "a", "parquet": "b"}, "found jsonl and parquet"),
        ({"jsonl": "a", "path": "b"}, "Extra inputs are not permitted"),
        ({"jsonl": ""}, "at least 1 character"),
        ({"jsonl": "a", "compression": "zstd"}, "compression is an option of parquet"),
        ({"parquet": "a.parquet", "partition_by": ["day"]}, "partition_by needs a folder"),
        ({"parquet": "a.parquet", "rows_per_file": 9}, "rows_per_file needs a folder"),
        ({"parquet": "a/", "partition_by": ["day", "day"]}, "names a column twice"),
        ({"parquet": "a/", "errors": "a/errors.parquet"}, "within the sink's folder"),
        ({"parquet": "a.parquet", "compression": "lzo"}, "Input should be"),
        ({"parquet": "a.parquet", "rows_per_group": 0}, "greater than or equal to 1"),
        ({"jsonl": "a", "errors": "a"}, "the sink's own path"),
        ({"sql": {"url": "env:DB", "table": "t"}, "errors": "t"}, "the sink's own table"),
        ({"sql": {"table": "t"}}, "url\n  Field required"),
        ({"sql": {"url": "env:DB", "table": "t", "upsert": True}}, "Extra inputs"),
    ],
)
def test_what_contradicts_itself_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        SinkConfig.model_validate(given)
