"""What is kept of a task while its run goes on."""

from pathlib import Path

import pyarrow as pa
import pytest

from nightjar.pipeline.runner.steps import Kept
from nightjar.pipeline.tasks.task_file import read_task
from tests.tasks import write_task

EVERYTHING = """
crop = {column = "review", tokens = "context", keep = "end"}
defaults = {review = "", stars = 3}
clean = {review = ["strip", "nfc"]}
[parameters]
max_tokens = {column = "most"}
stop = ["\\n"]
[sink]
sql = {url = "env:SHOP", table = "answers", mirror = true}
"""


@pytest.mark.parametrize(
    ("request_", "kind", "source"),
    [
        ('prompt = "{review}"', "generate", 'parquet = "rows.parquet"'),
        (
            'prompt = {jinja = "{{ review }}"}',
            "generate",
            'csv = {path = "r.csv", delimiter = ";"}',
        ),
        ('messages = {column = "review"}', "chat", 'sql = {url = "env:A", query = "SELECT 1"}'),
        ('messages = [{role = "user", content = "{review}"}]', "chat", 'jsonl = "s3://b/r"'),
        ('query = "q"\ndocuments = {column = "d", each = "{t}"}', "rank", 'jsonl = "rows.jsonl"'),
        ('prompt = "a"\ntext = "{review}"', "score", 'csv = "rows.csv"'),
    ],
)
def test_a_task_comes_back_as_it_was(tmp_path: Path, request_: str, kind: str, source: str) -> None:
    task = write_task(tmp_path, f"{request_}\n{EVERYTHING}", kind=kind, source=source)
    keys = pa.schema([pa.field("id", pa.timestamp("us", "UTC"), False)])
    kept = Kept(read_task(task), keys)
    again = Kept.from_json(kept.to_json())
    assert (again.file.task, again.file.path) == (kept.file.task, task)
    assert again.keys.equals(keys)
