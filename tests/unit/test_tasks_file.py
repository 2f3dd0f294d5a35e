"""Task files: what is read, and messages that name the file, the field and the mend."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic.fields import FieldInfo

from nightjar.pipeline.tasks import fields
from nightjar.pipeline.tasks.errors import TaskError
from nightjar.pipeline.tasks.fields import RankTask
from nightjar.pipeline.tasks.task_file import check_task, json_schema, read_task
from tests.tasks import PROMPT, write_task

ROOT = Path(__file__).resolve().parents[2]

RANK: dict[str, Any] = {
    "kind": "rank",
    "source": {"csv": {"path": "x.csv", "delimiter": ";", "types": {"n": "int64"}}, "key": ["id"]},
    "request": {
        "query": {"jinja": "{{ user }}"},
        "documents": {"column": "items", "each": "{title}"},
        "crop": {"column": "user", "tokens": "context"},
    },
    "parameters": {"top_n": 3},
    "sink": {"parquet": "out/", "partition_by": ["day"]},
}


def refused(values: dict[str, Any]) -> str:
    with pytest.raises(TaskError) as raised:
        check_task(values, "task.toml")
    return str(raised.value)


def test_yaml_and_toml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(RANK), encoding="utf-8")
    task = read_task(tmp_path / "task.yaml").task
    assert isinstance(task, RankTask)
    assert task == check_task(RANK, "task.toml")
    assert task.request.crop[0].tokens == "context"
    toml = write_task(tmp_path, more='[parameters]\nmax_tokens = 3\nstop = ["\\n"]')
    assert read_task(toml).task.parameters == {"max_tokens": 3, "stop": ["\n"]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "summarise"}, "kind: give one of generate, chat, rank, score"),
        ({"request": {"query": "q"}}, "request.documents: is missing; give it"),
        ({"sources": {}}, "sources: is not a field here; did you mean source?"),
        ({"source": {"csv": "x", "parquet": "y", "key": ["id"]}}, "found csv and parquet"),
        ({"source": {"key": ["id"]}}, "exactly one of jsonl, csv, parquet and sql; found none"),
        ({"source": {"csv": "x", "key": []}}, "source.key: "),
        ({"source": {"csv": "x", "key": ["id", "id"]}}, "key names a column twice"),
        ({"source": {"csv": "x"}}, "source.key: is missing"),
        ({"sink": {"parquet": "x", "jsonl": "y"}}, "found jsonl and parquet"),
        ({"sink": {"parquet": 3}}, "sink.parquet: should be a valid string"),
        ({"parameters": ["top_n"]}, "parameters: should be a valid dictionary"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], said: str) -> None:
    told = refused(RANK | changes)
    assert told.startswith("task.toml cannot be used:")
    assert said in told


def test_crops_that_contradict_themselves() -> None:
    request = RANK["request"] | {"crop": {"column": "user", "tokens": 5, "characters": 5}}
    assert "exactly one of tokens and characters" in refused(RANK | {"request": request})


def test_a_secret_is_not_repeated() -> None:
    source = {"sql": {"url": "postgresql://owl:s3cret@host/x", "query": 3}, "key": ["id"]}
    told = refused(RANK | {"source": source})
    assert "source.sql.query: should be a valid string" in told
    assert "s3cret" not in told


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.toml", b"kind = ", r"a\.toml is not TOML: "),
        ("a.yaml", b"kind: [", r"a\.yaml, line 1 is not YAML"),
        ("a.yaml", b"- kind", "holds no fields"),
        ("a.yaml", b"kind: !!python/object:os.system {}", r"a\.yaml, line 1 is not YAML"),
        ("a.toml", b"\xff", "is not UTF-8"),
        ("a.toml", b"#" * 2_000_000, "is longer than 1048576 bytes"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match=said):
        read_task(tmp_path / name)


def test_the_schema_for_editors_knows_each_field() -> None:
    schema = json_schema()
    text = json.dumps(schema)
    assert schema["discriminator"]["propertyName"] == "kind"
    assert len(schema["oneOf"]) == 4
    assert all(f'"{name}"' in text for name in ("partition_by", "timeout_s", "keep", "each"))
    told = [
        (name, field)
        for name, table in schema["$defs"].items()
        for field, value in table["properties"].items()
        if "description" not in value and not name.startswith("Sink")
    ]
    assert told == []


def test_what_a_task_says_is_compared_table_by_table(tmp_path: Path) -> None:
    before = read_task(write_task(tmp_path)).parts()
    comments = write_task(tmp_path, f"# other words, the same task\n{PROMPT}")
    assert read_task(comments).parts() == before
    after = read_task(write_task(tmp_path, 'prompt = "{review}!"')).parts()
    changed = [name for name, value in after.items() if before[name] != value]
    assert changed == ["the task's request"]


def test_batch_lines_need_no_package_of_tables() -> None:
    code = (
        "import sys, pathlib, nightjar.pipeline.embedded.run, nightjar.pipeline.front.cli\n"
        "module = sys.modules['nightjar.pipeline.front.cli.run']\n"
        "path = pathlib.Path('x.jsonl')\n"
        "module._work(path, path, path, {})\n"
        "sys.exit(any(name in sys.modules for name in ('pyarrow', 'yaml')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_reference_lists_each_field_with_its_default() -> None:
    """Of the sink, the page of sinks does."""
    text = (ROOT / "docs" / "reference" / "task-file.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]+) \|$", text, re.MULTILINE))
    models = [
        model
        for _, model in inspect.getmembers(fields, inspect.isclass)
        if issubclass(model, fields.Fields) and not model.__name__.startswith("_")
    ]
    expected = {
        (name, default_words(field), str(field.description))
        for model in models
        for name, field in model.model_fields.items()
    }
    assert listed == expected
    assert len(expected) > 35


def default_words(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default in (None, {}, []):
        return ""
    said = json.dumps(field.default)
    return f"`{said}`"
