"""The sink of a task: its places are relative to the task file."""

from pathlib import Path
from typing import Any

import pytest

from nightjar.pipeline.tables.sinks.config import SinkConfig
from nightjar.pipeline.tasks.errors import TaskError
from nightjar.pipeline.tasks.fields import Task
from nightjar.pipeline.tasks.sinks import answers_of, check_apart, is_there, placed_sink
from nightjar.pipeline.tasks.task_file import check_task

FOLDER = Path("/jobs/nightly")


@pytest.mark.parametrize(
    ("sink", "field", "placed"),
    [
        ({"parquet": "out/"}, "parquet", "/jobs/nightly/out/"),
        ({"parquet": "/data/out.parquet"}, "parquet", "/data/out.parquet"),
        ({"parquet": "s3://lake/out.parquet"}, "parquet", "s3://lake/out.parquet"),
        ({"jsonl": "../out.jsonl"}, "jsonl", "/jobs/nightly/../out.jsonl"),
        ({"jsonl": "out.jsonl", "errors": "bad.jsonl"}, "errors", "/jobs/nightly/bad.jsonl"),
        ({"jsonl": "out.jsonl"}, "errors", "same"),
    ],
)
def test_paths(sink: dict[str, Any], field: str, placed: str) -> None:
    found = placed_sink(SinkConfig.model_validate(sink), FOLDER, {})
    assert getattr(found.config, field) == placed
    assert found.overwriting().config.overwrite


def test_files_of_sqlite() -> None:
    def url_of(given: str, environment: dict[str, str]) -> tuple[str, str]:
        config = SinkConfig.model_validate({"sql": {"url": given, "table": "t"}})
        found = placed_sink(config, FOLDER, environment)
        assert found.config.sql is not None
        return found.config.sql.url, found.environment.get("SHOP", "")

    assert url_of("sqlite:///shop.db", {})[0] == "sqlite:////jobs/nightly/shop.db"
    assert url_of("sqlite:////data/shop.db", {})[0] == "sqlite:////data/shop.db"
    inside = url_of("env:SHOP", {"SHOP": "sqlite:///shop.db"})
    assert inside == ("env:SHOP", "sqlite:////jobs/nightly/shop.db")
    secret = "postgresql://owl:s3cret@host/shop"
    assert url_of("env:SHOP", {"SHOP": secret})[1] == secret
    assert url_of("no url", {})[0] == "no url"


def task(kind: str, **parameters: Any) -> Task:
    request = {"prompt": "p", "text": "t"} if kind == "score" else {"prompt": "p"}
    source = {"csv": "x.csv", "key": ["id"]}
    values = {"kind": kind, "source": source, "request": request, "parameters": parameters}
    return check_task(values, "task.toml")


def test_a_row_has_many_answers_where_n_says_so() -> None:
    assert not answers_of(task("generate")).many
    assert not answers_of(task("generate", n=1)).many
    assert answers_of(task("generate", n=3)).many
    assert answers_of(task("generate", n={"column": "n"})).many
    assert answers_of(task("score")).kind == "score"
    assert not answers_of(task("score")).many


def test_answers_are_apart_from_the_rows(tmp_path: Path) -> None:
    file, folder = task("generate"), "reviews/"
    in_folder = file.model_copy(
        update={"source": file.source.model_copy(update={"csv": None, "parquet": folder})}
    )
    check_apart(file, tmp_path, [str(tmp_path / "y.csv")])
    check_apart(in_folder, tmp_path, [str(tmp_path / "answers"), str(tmp_path / "reviews2")])
    with pytest.raises(TaskError, match="would replace the source x"):
        check_apart(file, tmp_path, [str(tmp_path / "." / "x.csv")])
    with pytest.raises(TaskError, match="in the folder of the source, reviews/"):
        check_apart(in_folder, tmp_path, [str(tmp_path / "reviews" / "answers.parquet")])


def test_whether_the_files_are_there(tmp_path: Path) -> None:
    config = SinkConfig(parquet=str(tmp_path / "out.parquet"))
    assert not is_there(config)
    (tmp_path / "out.parquet").touch()
    assert is_there(config)
    assert not is_there(config.model_copy(update={"errors": str(tmp_path / "bad.parquet")}))
    assert is_there(SinkConfig(parquet="s3://lake/out.parquet"))
